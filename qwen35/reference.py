"""The fused pieces in plain torch, on any device: what `kernels` must compute, and the path of the CPU.

The DeltaNet recurrence is transformers' own reference function. Every function has the signature of its namesake in
`kernels` and reads the same tables, so a test of the packing on the CPU tests the tables that the GPU reads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as published

from .forward import Held
from .pack import NOTHING, WINDOW, Tables
from .weights import DeltaLayer, Geometry

# transformers swaps this function for fla's kernel wherever fla imports, also for tensors on the CPU.
_delta_rule = getattr(published.torch_chunk_gated_delta_rule, "__wrapped__", published.torch_chunk_gated_delta_rule)


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add delta [rows, hidden] to residual in place, return the RMS norm of the sum times 1 + weight."""
    if delta is not None:
        residual += delta
    return _norm(residual, 1.0 + weight.float(), epsilon)


def swiglu(gate_up: Tensor) -> Tensor:
    """From [rows, 2 * middle] = gate then up: silu(gate) * up, [rows, middle]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, epsilon: float) -> Tensor:
    """RMS norm of each head times 1 + weight, then RoPE on its first dims.

    heads: [rows, heads, size], any strides with the last dim contiguous; cos, sin: [rows, rotary / 2] float32.
    """
    normed = _norm(heads, 1.0 + weight.float(), epsilon)
    half = cos.shape[-1]
    first, second, rest = normed[..., :half].float(), normed[..., half : 2 * half].float(), normed[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(heads.dtype), rest], dim=-1)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, gate: Tensor, tiles: Tensor, held: Held, layer: int
) -> Tensor:
    """Attention by tiles (see `pack.TILE`), times the sigmoid of the output gate.

    queries: [rows, query heads, size]; keys, values: [stream rows, key-value heads, size]; gate as queries; layer
    counts attention layers. Returns [rows, query heads * size]; rows in no tile hold anything.
    """
    group = queries.shape[1] // keys.shape[1]
    out = torch.zeros_like(queries)
    for row, count, offset, own, prefix, prefix_count, carry, carry_count in tiles.tolist():
        if not count:
            continue
        spans = [(keys[prefix : prefix + prefix_count], values[prefix : prefix + prefix_count])]
        if carry_count:
            one = held.carries[carry]
            spans.insert(0, (one.keys[layer, :carry_count], one.values[layer, :carry_count]))
        end = own + offset + count
        spans.append((keys[own:end], values[own:end]))
        joined = (torch.cat(runs) for runs in zip(*spans, strict=True))
        key, value = (run.repeat_interleave(group, dim=1).transpose(0, 1) for run in joined)
        before = carry_count + prefix_count + offset
        seen = torch.arange(key.shape[1])[None] <= before + torch.arange(count)[:, None]
        query = queries[row : row + count].transpose(0, 1)
        out[row : row + count] = F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(0, 1)
    return (out * gate.sigmoid()).flatten(1)


def delta_net(
    projected: Tensor,
    inputs: Tensor,
    entered: Tensor,
    tables: Tables,
    layer: DeltaLayer,
    states: Tensor,
    geometry: Geometry,
) -> Tensor:
    """Convolution, gated delta rule and gated norm over every segment.

    projected: [rows, channels + value width + 2 * value heads]; inputs: [carried rows, channels], the convolution's
    earlier inputs that `tables.before` points to; entered: [carries, value heads, key, value] float32; states: [slots,
    value heads, key, value] float32, entered and left as the tables say. Returns [rows, value heads * value size];
    rows of no segment hold anything.
    """
    g, rows = geometry, len(projected)
    width = g.key_heads * g.key
    taken = projected[:, : g.channels]
    everything = torch.cat([taken, taken.new_zeros(1, g.channels), inputs])
    borders = tables.borders.tolist()
    mixed = torch.zeros_like(taken)
    for start, stop, before in zip(borders, borders[1:], tables.before.tolist(), strict=False):
        earlier = [row if row >= 0 else rows if row == NOTHING else rows - 1 - row for row in reversed(before)]
        joined = torch.cat([everything[earlier], taken[start:stop]])
        mixed[start:stop] = sum(joined[k : k + stop - start] * layer.conv[k] for k in range(WINDOW + 1))
    mixed = F.silu(mixed)
    query = mixed[:, :width].view(rows, g.key_heads, g.key)
    key = mixed[:, width : 2 * width].view(rows, g.key_heads, g.key)
    value = mixed[:, 2 * width :].view(rows, g.value_heads, g.value)
    gate = projected[:, g.channels : -2 * g.value_heads].view(rows, g.value_heads, g.value)
    beta, decay = projected[:, -2 * g.value_heads : -g.value_heads].sigmoid(), projected[:, -g.value_heads :]
    decay = layer.decay_rate * F.softplus(decay.float() + layer.decay_bias)
    repeats = g.value_heads // g.key_heads
    query, key = query.repeat_interleave(repeats, 1), key.repeat_interleave(repeats, 1)

    out = torch.zeros_like(value)
    for segment, (enter, leave) in enumerate(zip(tables.enter.tolist(), tables.leave.tolist(), strict=True)):
        span = slice(borders[segment], borders[segment + 1])
        if span.start == span.stop:
            continue
        start = states[enter] if enter >= 0 else entered[-2 - enter] if enter < NOTHING else None
        one, state = _delta_rule(
            *(x[None, span] for x in (query, key, value)),
            g=decay[None, span],
            beta=beta[None, span],
            initial_state=None if start is None else start[None],
            output_final_state=leave >= 0,
            use_qk_l2norm_in_kernel=True,
        )
        out[span] = one[0]
        if leave >= 0:
            states[leave] = state[0]
    normed = _norm(out, layer.out_norm.float(), g.epsilon)
    return (normed * F.silu(gate)).flatten(1)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)
