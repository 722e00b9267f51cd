"""The fused pieces as Triton kernels; `reference` says in plain torch what each computes.

Two kernels inside a DeltaNet chunk (the triangular solve and its products) are flash-linear-attention's, launched with
pinned configurations: left to itself the library tunes them again in every process, and stalls live traffic. All
others are ours: they read the projections' outputs in place, by stride, and take their rows from the pass's tables.
Sizes that change from pass to pass are never specialised on, so that nothing compiles after the warm-up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_kkt_solve_kernel as _tuned_solve
from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd_kernel as _tuned_products
from torch import Tensor

from .forward import Held
from .pack import CHUNK, QUERY_TILE_ROWS, Tables
from .weights import DeltaLayer, Geometry

# The bare kernels under the library's heuristics and autotuner.
_solve_kernel: Any = _tuned_solve.fn.fn
_products_kernel: Any = _tuned_products.fn.fn

CONVOLUTION = {"ROWS": 16, "num_warps": 4}
SOLVE = {"BK": 128, "num_warps": 1, "num_stages": 3}
PRODUCTS = {"num_warps": 4, "num_stages": 3}
STATE = {"BV": 32, "num_warps": 4, "num_stages": 3}
STATE_OF_MANY = {"BV": 64, "num_warps": 4, "num_stages": 2}
MANY = 4
"""Segments from which wider programs fill the GPU too, and read less."""
OUTPUT = {"num_warps": 4, "num_stages": 2}
ATTENTION = {"BN": 64, "num_warps": 8, "num_stages": 2}

ELEMENTS = 2048
LOG2_E = 1.4426950408889634


def misfit(geometry: Geometry, device: torch.device) -> str | None:
    """Why these kernels do not fit the geometry or the device, or None."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    if (geometry.key, geometry.value) != (128, 128):
        return f"DeltaNet heads of {geometry.key} and {geometry.value}, not 128"
    if geometry.head not in (64, 128, 256):
        return f"attention heads of {geometry.head}, not 64, 128 or 256"
    if geometry.group not in (1, 2, 4, 8, 16) or geometry.value_heads % geometry.key_heads:
        return "head groups that do not divide a tile"
    if geometry.value_heads & (geometry.value_heads - 1):
        return f"{geometry.value_heads} value heads, not a power of two"
    return None


@triton.jit
def _add_norm_kernel(
    residual, delta, weight, out, epsilon, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x = tl.load(residual + row + column, mask=inside, other=0.0)
    if HAS_DELTA:
        x = x + tl.load(delta + row + column, mask=inside, other=0.0)
        tl.store(residual + row + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + epsilon)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, wide * scale * (1.0 + w), mask=inside)


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """See reference.add_norm."""
    rows, hidden = residual.shape
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(hidden)
    _add_norm_kernel[(rows,)](
        residual,
        residual if delta is None else delta,
        weight,
        out,
        epsilon,
        HIDDEN=hidden,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        num_warps=4,
    )
    return out


@triton.jit
def _swiglu_kernel(gate_up, out, MIDDLE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < MIDDLE
    gate = tl.load(gate_up + row * 2 * MIDDLE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * MIDDLE + MIDDLE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * MIDDLE + column, gate * tl.sigmoid(gate) * up, mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """See reference.swiglu."""
    rows, middle = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, middle)
    grid = (rows, triton.cdiv(middle, ELEMENTS))
    _swiglu_kernel[grid](gate_up, out, MIDDLE=middle, BLOCK=ELEMENTS, num_warps=8)
    return out


@triton.jit
def _rotate_kernel(
    heads,
    weight,
    cos,
    sin,
    out,
    epsilon,
    ROW: tl.constexpr,
    STEP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    # A rotated column meets its partner half a rotation away; the others meet themselves with sine 0.
    turned = column < 2 * HALF
    partner = tl.where(column < HALF, column + HALF, tl.where(turned, column - HALF, column))
    source = heads + row * ROW + head * STEP
    x = tl.load(source + column).to(tl.float32)
    y = tl.load(source + partner).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + epsilon)[:, None]
    x = x * scale * (1.0 + tl.load(weight + column).to(tl.float32))
    y = y * scale * (1.0 + tl.load(weight + partner).to(tl.float32))
    angle = row * HALF + column % HALF
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    s = tl.where(column < HALF, -s, s)
    tl.store(out + (row * HEADS + head) * SIZE + column, x * c + y * s)


def rotate(heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, epsilon: float) -> Tensor:
    """See reference.rotate."""
    rows, count, size = heads.shape
    out = heads.new_empty(rows, count, size)
    _rotate_kernel[(rows,)](
        heads,
        weight,
        cos,
        sin,
        out,
        epsilon,
        ROW=heads.stride(0),
        STEP=heads.stride(1),
        HEADS=count,
        SIZE=size,
        HALF=cos.shape[-1],
        num_warps=4,
    )
    return out


@triton.jit
def _attend_span(
    acc, top, total, query, keys, values, ROW_K, ROW_V, limit, count, scale, SIZE: tl.constexpr, BN: tl.constexpr
):
    """One run of key-values: query row i sees its first limit[i] of `count`."""
    column = tl.arange(0, SIZE)
    for start in range(0, count, BN):
        at = start + tl.arange(0, BN)
        inside = at < count
        row = at.to(tl.int64)
        key = tl.load(keys + row[None, :] * ROW_K + column[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(query, key) * scale
        scores = tl.where((at[None, :] < limit[:, None]) & inside[None, :], scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps -inf as its peak; zero stands in, so that no inf - inf arises.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        part = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(part, axis=1)
        value = tl.load(values + row[:, None] * ROW_V + column[None, :], mask=inside[:, None], other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(part.to(value.dtype), value, acc)
        top = peak
    return acc, top, total


@triton.jit(do_not_specialize=["layer"])
def _attention_kernel(
    queries,
    keys,
    values,
    gate,
    out,
    tiles,
    carries,
    layer,
    scale,
    ROW_V: tl.constexpr,
    ROW_G: tl.constexpr,
    STEP_G: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CARRIED: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 8
    shared = tl.program_id(1)
    count = tl.load(tile + 1)
    if count == 0:
        return
    first = tl.load(tile).to(tl.int64)
    offset = tl.load(tile + 2)
    own = tl.load(tile + 3).to(tl.int64)
    prefix = tl.load(tile + 4).to(tl.int64)
    prefix_count = tl.load(tile + 5)

    line = tl.arange(0, BM)
    token = line // GROUP
    head = shared * GROUP + line % GROUP
    column = tl.arange(0, SIZE)
    used = (token < count)[:, None]
    place = ((first + token) * HEADS + head)[:, None] * SIZE + column[None, :]
    query = tl.load(queries + place, mask=used, other=0.0)

    ROW_K: tl.constexpr = HEADS // GROUP * SIZE
    acc = tl.zeros([BM, SIZE], dtype=tl.float32)
    top = tl.full([BM], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    if CARRIED:
        carry_count = tl.load(tile + 7)
        if carry_count > 0:
            held = carries + tl.load(tile + 6) * 3
            stride = tl.load(held + 2) * layer
            held_keys = tl.load(held).to(tl.pointer_type(queries.dtype.element_ty)) + stride + shared * SIZE
            held_values = tl.load(held + 1).to(tl.pointer_type(queries.dtype.element_ty)) + stride + shared * SIZE
            everything = tl.zeros([BM], dtype=tl.int32) + carry_count
            acc, top, total = _attend_span(
                acc, top, total, query, held_keys, held_values, ROW_K, ROW_K, everything, carry_count, scale, SIZE, BN
            )
    keys += shared * SIZE
    values += shared * SIZE
    everything = tl.zeros([BM], dtype=tl.int32) + prefix_count
    acc, top, total = _attend_span(
        acc,
        top,
        total,
        query,
        keys + prefix * ROW_K,
        values + prefix * ROW_V,
        ROW_K,
        ROW_V,
        everything,
        prefix_count,
        scale,
        SIZE,
        BN,
    )
    acc, top, total = _attend_span(
        acc,
        top,
        total,
        query,
        keys + own * ROW_K,
        values + own * ROW_V,
        ROW_K,
        ROW_V,
        offset + token + 1,
        offset + count,
        scale,
        SIZE,
        BN,
    )
    source = gate + (first + token)[:, None] * ROW_G + head[:, None] * STEP_G + column[None, :]
    opening = tl.load(source, mask=used, other=0.0)
    result = acc / total[:, None] * tl.sigmoid(opening.to(tl.float32))
    tl.store(out + place, result, mask=used)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, gate: Tensor, tiles: Tensor, held: Held, layer: int
) -> Tensor:
    """See reference.attend."""
    rows, heads, size = queries.shape
    shared = keys.shape[1]
    out = queries.new_empty(rows, heads * size)
    group = heads // shared
    _attention_kernel[(len(tiles), shared)](
        queries,
        keys,
        values,
        gate,
        out,
        tiles,
        held.places,
        layer,
        size**-0.5 * LOG2_E,
        ROW_V=values.stride(0),
        ROW_G=gate.stride(0),
        STEP_G=gate.stride(1),
        HEADS=heads,
        GROUP=group,
        SIZE=size,
        BM=QUERY_TILE_ROWS,
        CARRIED=len(held.places) > 0,
        **ATTENTION,
    )
    return out


@triton.jit
def _convolution_kernel(
    projected,
    inputs,
    before,
    chunk_rows,
    chunk_of,
    conv,
    decay_rate,
    decay_bias,
    query,
    key,
    value,
    decay,
    beta,
    ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Axis 0: a program for each head of 128 channels, the last for decay and beta; axis 1: ROWS of a chunk each."""
    head = tl.program_id(0)
    chunk = tl.program_id(1) // (BT // ROWS)
    first = tl.program_id(1) % (BT // ROWS) * ROWS
    count = tl.load(chunk_rows + 2 * chunk + 1)
    if first >= count:
        return
    start = tl.load(chunk_rows + 2 * chunk).to(tl.int64)
    if head < 2 * KEY_HEADS + VALUE_HEADS:
        line = tl.arange(0, ROWS)
        row = start + first + line
        inside = first + line < count
        mask = inside[:, None]
        column = head * SIZE + tl.arange(0, SIZE)
        place = projected + row[:, None] * ROW + column[None, :]
        acc = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        acc *= tl.load(conv + 3 * CHANNELS + column).to(tl.float32)[None, :]
        nth = tl.load(chunk_of + 2 * chunk + 1)
        for step in tl.static_range(3):
            if nth + first > 0:
                near = tl.load(place - (step + 1) * ROW, mask=mask, other=0.0)
            else:  # the first rows of a segment look over its border
                beyond = inside & (line <= step)
                segment = tl.load(chunk_of + 2 * chunk)
                source = tl.load(before + segment * 3 + step - line, mask=beyond, other=-1)
                source = tl.where(beyond, source, row - 1 - step)
                near = tl.load(
                    projected + source[:, None] * ROW + column[None, :], mask=mask & (source >= 0)[:, None], other=0.0
                )
                held = inputs + (-2 - source)[:, None] * CHANNELS + column[None, :]
                near += tl.load(held, mask=(source < -1)[:, None], other=0.0)
            acc += near.to(tl.float32) * tl.load(conv + (2 - step) * CHANNELS + column).to(tl.float32)[None, :]
        acc *= tl.sigmoid(acc)
        width = tl.arange(0, SIZE)[None, :]
        if head < 2 * KEY_HEADS:
            acc *= tl.rsqrt(tl.sum(acc * acc, axis=1) + 1e-6)[:, None]
            if head < KEY_HEADS:
                tl.store(query + (row[:, None] * KEY_HEADS + head) * SIZE + width, acc, mask=mask)
            else:
                tl.store(key + (row[:, None] * KEY_HEADS + head - KEY_HEADS) * SIZE + width, acc, mask=mask)
        else:
            tl.store(value + (row[:, None] * VALUE_HEADS + head - 2 * KEY_HEADS) * SIZE + width, acc, mask=mask)
    elif first == 0:
        row = start + tl.arange(0, BT)
        live = (tl.arange(0, BT) < count)[:, None]
        each = tl.arange(0, VALUE_HEADS)[None, :]
        pair = projected + row[:, None] * ROW + CHANNELS + VALUE_HEADS * SIZE + each
        place = row[:, None] * VALUE_HEADS + each
        b = tl.load(pair, mask=live, other=0.0).to(tl.float32)
        tl.store(beta + place, tl.sigmoid(b), mask=live)
        a = tl.load(pair + VALUE_HEADS, mask=live, other=0.0).to(tl.float32) + tl.load(decay_bias + each)
        rise = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(a)))
        rate = tl.where(live, tl.load(decay_rate + each) * rise * 1.4426950408889634, 0.0)
        tl.store(decay + place, tl.cumsum(rate, axis=0), mask=live)


@triton.jit(do_not_specialize=["first_segment"])
def _state_kernel(
    key,
    lifted,
    solved,
    fresh,
    decay,
    chunk_states,
    states,
    entered,
    borders,
    first_chunk,
    enter,
    leave,
    first_segment,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
):
    """Carry the state through the chunks of one segment, for one head and BV of its value columns."""
    segment = first_segment + tl.program_id(1) // VALUE_HEADS
    head = tl.program_id(1) % VALUE_HEADS
    start = tl.load(borders + segment).to(tl.int64)
    length = (tl.load(borders + segment + 1) - start).to(tl.int32)
    if length == 0:
        return
    shared = head // (VALUE_HEADS // KEY_HEADS)
    deep = tl.arange(0, SIZE)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    square = deep[:, None] * SIZE + column[None, :]
    slot = tl.load(enter + segment).to(tl.int64)
    every = square >= 0
    if slot >= 0:
        state = tl.load(states + (slot * VALUE_HEADS + head) * SIZE * SIZE + square)
    else:
        held = entered + ((-2 - slot) * VALUE_HEADS + head) * SIZE * SIZE + square
        state = tl.load(held, mask=every & (slot < -1), other=0.0)
    key += (start * KEY_HEADS + shared) * SIZE
    lifted += (start * VALUE_HEADS + head) * SIZE
    solved += (start * VALUE_HEADS + head) * SIZE
    fresh += (start * VALUE_HEADS + head) * SIZE
    decay += start * VALUE_HEADS + head
    chunk_states += (tl.load(first_chunk + segment).to(tl.int64) * VALUE_HEADS + head) * SIZE * SIZE
    line = tl.arange(0, BT)
    for chunk in range(0, tl.cdiv(length, BT)):
        at = chunk * BT + line
        inside = (at < length)[:, None]
        tl.store(chunk_states + square, state.to(chunk_states.dtype.element_ty))
        chunk_states += VALUE_HEADS * SIZE * SIZE
        place = at.to(tl.int64)[:, None] * (VALUE_HEADS * SIZE)
        w = tl.load(lifted + place + deep[None, :], mask=inside, other=0.0)
        u = tl.load(solved + place + column[None, :], mask=inside, other=0.0)
        v = u - tl.dot(w, state.to(w.dtype))
        tl.store(fresh + place + column[None, :], v.to(fresh.dtype.element_ty), mask=inside)
        last = tl.load(decay + (tl.minimum((chunk + 1) * BT, length) - 1).to(tl.int64) * VALUE_HEADS)
        each = tl.load(decay + at.to(tl.int64) * VALUE_HEADS, mask=at < length, other=0.0)
        v = v * tl.where(at < length, tl.exp2(last - each), 0.0)[:, None]
        source = key + at.to(tl.int64)[None, :] * (KEY_HEADS * SIZE) + deep[:, None]
        k = tl.load(source, mask=at[None, :] < length, other=0.0)
        state = tl.dot(k, v.to(k.dtype), state * tl.exp2(last))
    goal = tl.load(leave + segment).to(tl.int64)
    tl.store(states + (goal * VALUE_HEADS + head) * SIZE * SIZE + square, state, mask=every & (goal >= 0))


@triton.jit
def _output_kernel(
    query,
    key,
    fresh,
    decay,
    chunk_states,
    gate,
    weight,
    out,
    chunk_rows,
    scale,
    epsilon,
    ROW: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
):
    """The chunk's outputs for one head, normed and gated."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(chunk_rows + 2 * chunk + 1)
    if count == 0:
        return
    shared = head // (VALUE_HEADS // KEY_HEADS)
    line = tl.arange(0, BT)
    row = (tl.load(chunk_rows + 2 * chunk) + line).to(tl.int64)
    inside = line < count
    deep = tl.arange(0, SIZE)
    q = tl.load(query + (row[:, None] * KEY_HEADS + shared) * SIZE + deep[None, :], mask=inside[:, None], other=0.0)
    k = tl.load(key + (row[None, :] * KEY_HEADS + shared) * SIZE + deep[:, None], mask=inside[None, :], other=0.0)
    state = tl.load(
        chunk_states + (chunk.to(tl.int64) * VALUE_HEADS + head) * SIZE * SIZE + deep[:, None] * SIZE + deep[None, :]
    )
    g = tl.load(decay + row * VALUE_HEADS + head, mask=inside, other=0.0)
    attention = tl.dot(q, k)
    seen = (line[:, None] >= line[None, :]) & inside[:, None] & inside[None, :]
    attention = tl.where(seen, attention * tl.exp2(g[:, None] - g[None, :]), 0.0)
    v = tl.load(fresh + (row[:, None] * VALUE_HEADS + head) * SIZE + deep[None, :], mask=inside[:, None], other=0.0)
    result = tl.dot(q, state) * tl.exp2(g)[:, None]
    result = tl.dot(attention.to(v.dtype), v, result) * scale
    result *= tl.rsqrt(tl.sum(result * result, axis=1) / SIZE + epsilon)[:, None]
    result *= tl.load(weight + deep).to(tl.float32)[None, :]
    z = tl.load(gate + row[:, None] * ROW + head * SIZE + deep[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    result *= z * tl.sigmoid(z)
    tl.store(out + (row[:, None] * VALUE_HEADS + head) * SIZE + deep[None, :], result, mask=inside[:, None])


def delta_net(
    projected: Tensor,
    inputs: Tensor,
    entered: Tensor,
    tables: Tables,
    layer: DeltaLayer,
    states: Tensor,
    geometry: Geometry,
) -> Tensor:
    """See reference.delta_net."""
    g, shape, rows = geometry, tables.shape, len(projected)
    heads: dict[str, Any] = {"KEY_HEADS": g.key_heads, "VALUE_HEADS": g.value_heads, "SIZE": g.value, "BT": CHUNK}
    query = projected.new_empty(rows, g.key_heads, g.key)
    key = torch.empty_like(query)
    value = projected.new_empty(rows, g.value_heads, g.value)
    decay = projected.new_empty(rows, g.value_heads, dtype=torch.float32)
    beta = torch.empty_like(decay)
    _convolution_kernel[(2 * g.key_heads + g.value_heads + 1, shape.chunks * (CHUNK // CONVOLUTION["ROWS"]))](
        projected,
        inputs,
        tables.before,
        tables.chunk_rows,
        tables.chunk_of,
        layer.conv,
        layer.decay_rate,
        layer.decay_bias,
        query,
        key,
        value,
        decay,
        beta,
        ROW=projected.stride(0),
        CHANNELS=g.channels,
        **heads,
        **CONVOLUTION,
    )
    fla: dict[str, Any] = {"T": rows, "H": g.key_heads, "HV": g.value_heads, "K": g.key, "BT": CHUNK}
    fla |= {"cu_seqlens": tables.borders, "chunk_indices": tables.chunk_of, "USE_G": True, "IS_VARLEN": True}
    # Blocks above the diagonal are never written, but read.
    inverse = projected.new_zeros(rows, g.value_heads, CHUNK)
    grid = (shape.chunks, g.value_heads)
    _solve_kernel[grid](k=key, g=decay, beta=beta, A=inverse, BC=16, **fla, **SOLVE)
    lifted, solved = torch.empty_like(value), torch.empty_like(value)
    _products_kernel[grid](
        k=key, v=value, beta=beta, w=lifted, u=solved, A=inverse, g=decay, V=g.value, BK=64, BV=64, **fla, **PRODUCTS
    )
    fresh = value  # no longer read
    chunk_states = projected.new_empty(shape.chunks, g.value_heads, g.key, g.value)
    for first, count in ((0, shape.trunks), (shape.trunks, shape.tails)):
        if count:
            setting = STATE_OF_MANY if count >= MANY else STATE
            _state_kernel[(g.value // setting["BV"], count * g.value_heads)](
                key,
                lifted,
                solved,
                fresh,
                decay,
                chunk_states,
                states,
                entered,
                tables.borders,
                tables.first_chunk,
                tables.enter,
                tables.leave,
                first,
                **heads,
                **setting,
            )
    out = projected.new_empty(rows, g.value_heads * g.value)
    _output_kernel[grid](
        query,
        key,
        fresh,
        decay,
        chunk_states,
        projected[:, g.channels :],
        layer.out_norm,
        out,
        tables.chunk_rows,
        g.key**-0.5,
        g.epsilon,
        ROW=projected.stride(0),
        **heads,
        **OUTPUT,
    )
    return out
