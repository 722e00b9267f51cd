"""From requests to one flat stream: who reads what, as integer tables.

A request is a prefix that its questions share and one tail per question. The stream of a pass is
[trunks | tails]: every trunk is read once, and each tail starts from its trunk's last inputs (convolution),
recurrent state (DeltaNet) and key-values (attention). Tails part from the trunk exactly where their ids part.
Cutting at a multiple of 64 instead would keep the chunk borders of an unforked run, at up to 63 tokens read
again for every question (4 to 10 % of the measured workloads); the state crosses the border in float32, so the
borders move rounding only, and the parity bench finds no difference to the plain engine's noise.

A trunk longer than a pass goes through in slices, multiples of 64 long, and its state waits in a `Carry`.
Nothing here knows tensors on a device: all tables are int32 and live in one buffer, so that one copy moves them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

CHUNK = 64
"""Tokens in one DeltaNet chunk; slices of a long trunk are multiples of it."""
WINDOW = 3
"""Earlier inputs that the causal convolution (kernel 4) looks at."""
MIN_SLICE = 256
"""A pass under about 256 tokens costs as much as one of 256, so no long trunk advances by less."""
QUERY_TILE_ROWS = 128
"""Rows of one attention tile: tokens times the query heads that share a key-value head."""
NOTHING = -1
"""In a table of rows or slots: no such row, read zeros."""

Ints = npt.NDArray[np.int32]


class Forked(NamedTuple):
    """One request: token ids that all its questions share (may be empty), then one tail (>= 1 id) per question."""

    prefix: Sequence[int]
    tails: Sequence[Sequence[int]]


@dataclass(slots=True, eq=False)
class Carry:
    """What a trunk leaves for later passes.

    keys, values: [attention layers, trunk length, key-value heads, head size] in the model's dtype.
    inputs: [DeltaNet layers, WINDOW, channels], the last inputs of the convolution, oldest first.
    state: [DeltaNet layers, value heads, key size, value size], float32.
    shared: other trunks start from it too, so it is never written again.
    """

    keys: Tensor
    values: Tensor
    inputs: Tensor
    state: Tensor
    shared: bool = False


class Root(NamedTuple):
    """Ids that requests usually begin with, and what they leave: encoded once, kept for good."""

    ids: Ints
    carry: Carry


@dataclass(slots=True, eq=False)
class Part:
    """One trunk and the tails that grow from it, with how far the passes have come."""

    trunk: Ints
    tails: list[Ints]
    reads_trunk: bool
    first: int  # index of this part's first hidden state among the request's
    done: int = 0
    next_tail: int = 0
    carry: Carry | None = None

    @property
    def reads(self) -> int:
        return len(self.tails) + self.reads_trunk

    @property
    def left(self) -> int:
        return len(self.trunk) - self.done + sum(len(tail) for tail in self.tails[self.next_tail :])

    @property
    def finished(self) -> bool:
        return self.done == len(self.trunk) and self.next_tail == len(self.tails)


class Share(NamedTuple):
    """What one part gives to one pass: trunk[start:stop] and tails[first:last]."""

    part: Part
    start: int
    stop: int
    first: int
    last: int

    @property
    def saves(self) -> bool:
        more = self.stop < len(self.part.trunk) or self.last < len(self.part.tails)
        return more and self.stop > self.start

    @property
    def tokens(self) -> int:
        return self.stop - self.start + sum(len(tail) for tail in self.part.tails[self.first : self.last])


def parts_of(request: Forked, budget: int, root: Root | None = None) -> list[Part]:
    """Split a request into parts whose tails fit a pass of `budget` tokens.

    A lone question is not forked: prefix and tail are one trunk. A tail that no pass can hold takes its own copy
    of the prefix with it and goes through in slices. A trunk that begins with the root starts behind it. Raises
    ValueError for a request without tails or an empty tail.
    """
    if not request.tails or not all(len(tail) for tail in request.tails):
        raise ValueError("a request needs at least one tail, and every tail at least one token")
    prefix = np.asarray(request.prefix, dtype=np.int32)
    tails = [np.asarray(tail, dtype=np.int32) for tail in request.tails]
    if len(tails) == 1 or any(len(tail) > budget for tail in tails):
        whole = (np.concatenate([prefix, tail]) for tail in tails)
        parts = [Part(trunk, [], reads_trunk=True, first=i) for i, trunk in enumerate(whole)]
    else:
        parts = [Part(prefix, tails, reads_trunk=False, first=0)]
    if root is not None:
        for part in parts:
            # The position that is read must be encoded here, so a trunk that is read is longer than the root.
            if len(part.trunk) >= len(root.ids) + part.reads_trunk and (part.trunk[: len(root.ids)] == root.ids).all():
                part.done, part.carry = len(root.ids), root.carry
    return parts


def divide(parts: Sequence[Part], budget: int, max_tails: int) -> list[Share]:
    """Decide what each part gives to the next pass, in the caller's order.

    Together at most `budget` tokens and `max_tails` tails. The first unfinished part always moves on, so repeated
    passes end (budget >= MIN_SLICE).
    """
    shares: list[Share] = []
    for part in parts:
        if part.finished:
            continue
        take = min(len(part.trunk) - part.done, budget)
        stop = part.done + take
        if stop < len(part.trunk):
            take = take // CHUNK * CHUNK
            stop = part.done + take
            if take < MIN_SLICE:
                continue
        budget -= take
        last = part.next_tail
        if stop == len(part.trunk):
            while last < len(part.tails) and max_tails and len(part.tails[last]) <= budget:
                budget -= len(part.tails[last])
                max_tails -= 1
                last += 1
        if take or last > part.next_tail:
            shares.append(Share(part, part.done, stop, part.next_tail, last))
    return shares


class Shape(NamedTuple):
    """How many entries each table of a pass has; a graph's tables are as wide as its widest pass."""

    tokens: int
    trunks: int
    tails: int
    chunks: int
    tiles: int
    reads: int
    slots: int

    def holds(self, other: Shape) -> bool:
        """Whether tables of this shape have room for a pass of the other."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


@lru_cache(maxsize=1024)
def _layout(shape: Shape) -> tuple[int, dict[str, tuple[slice, tuple[int, ...]]]]:
    """Length of the buffer, and where each table of a pass lies in it with what shape."""
    segments = shape.trunks + shape.tails
    sizes: dict[str, tuple[int, ...]] = {
        "ids": (shape.tokens,),
        "positions": (shape.tokens,),
        "borders": (segments + 2,),
        "before": (segments + 1, WINDOW),
        "chunk_rows": (shape.chunks, 2),
        "chunk_of": (shape.chunks, 2),
        "first_chunk": (segments + 1,),
        "enter": (segments + 1,),
        "leave": (segments + 1,),
        "tiles": (shape.tiles, len(TILE)),
        "last_tiles": (shape.reads, len(TILE)),
        "reads": (shape.reads,),
    }
    offset, places = 0, {}
    for name, size in sizes.items():
        places[name] = (slice(offset, offset + math.prod(size)), size)
        # Kernels are compiled for 16-byte aligned pointers: an odd table would be a new compilation.
        offset += -(-math.prod(size) // 4) * 4
    return offset, places


class Tables:
    """The integer tables of one pass, views into one int32 buffer (a numpy array or a tensor).

    ids, positions [tokens]. borders [trunks + tails + 2]: where each segment starts, closed by an empty segment that
    unused chunks point to; before [trunks + tails + 1, 3]: the row of the input 1, 2, 3 steps before a segment,
    NOTHING before the start, -2 - r for row r of the carried inputs; chunk_rows [chunks, 2]: first row and length;
    chunk_of [chunks, 2]: segment and chunk within it; first_chunk [trunks + tails + 1]; enter, leave [trunks + tails
    + 1]: the state slot a segment starts from (NOTHING: zeros, -2 - c: the state of carry c) and leaves its state in.
    tiles [tiles, 8] and last_tiles [reads, 8]: see `TILE`. reads [reads].
    """

    def __init__(self, shape: Shape, tile: int, buffer: Any | None = None) -> None:
        self.shape = shape
        self.tile = tile
        self.length, places = _layout(shape)
        self.buffer = np.zeros(self.length, dtype=np.int32) if buffer is None else buffer
        for name, (place, size) in places.items():
            setattr(self, name, self.buffer[place].reshape(size))

    ids: Any
    positions: Any
    borders: Any
    before: Any
    chunk_rows: Any
    chunk_of: Any
    first_chunk: Any
    enter: Any
    leave: Any
    tiles: Any
    last_tiles: Any
    reads: Any


TILE = ("query_row", "count", "offset", "own_row", "prefix_row", "prefix_count", "carry", "carry_count")
"""A run of `count` query rows of one segment, the first at `offset` in it: it reads carry_count carried key-values,
then prefix_count rows of the stream, then its own segment from own_row up to itself."""


@dataclass(slots=True)
class Plan:
    """One pass: its shares, its exact shape and the facts that the tables are built from."""

    shares: list[Share]
    tile: int
    shape: Shape = field(init=False)
    carries: list[Carry] = field(init=False)  # what trunks start from, each once
    saves: list[tuple[int, Share]] = field(init=False)  # (segment and state slot, share) that end in a carry
    owners: list[tuple[Part, int, int]] = field(init=False)  # whose hidden states the reads are: part, first, count
    _trunk_lengths: Ints = field(init=False)
    _tail_lengths: Ints = field(init=False)
    _parent: Ints = field(init=False)
    _carry: Ints = field(init=False)
    _trunk_reads: Ints = field(init=False)

    def __post_init__(self) -> None:
        trunk_lengths, tail_lengths, parent = [], [], []
        self.saves, self.owners = [], []
        trunk_reads: list[tuple[Part, int]] = []
        held: dict[int, Carry] = {id(share.part.carry): share.part.carry for share in self.shares if share.part.carry}
        self.carries = list(held.values())
        number = {key: index for index, key in enumerate(held)}
        self._carry = np.array([number.get(id(share.part.carry), NOTHING) for share in self.shares], dtype=np.int32)
        for index, share in enumerate(self.shares):
            part, tails = share.part, share.part.tails[share.first : share.last]
            if share.saves:
                self.saves.append((index, share))
            trunk_lengths.append(share.stop - share.start)
            tail_lengths += [len(tail) for tail in tails]
            parent += [index] * len(tails)
            if tails:
                self.owners.append((part, part.first + share.first, len(tails)))
            if part.reads_trunk and share.stop == len(part.trunk):
                trunk_reads.append((part, index))
        self._trunk_lengths = np.array(trunk_lengths, dtype=np.int32)
        self._tail_lengths = np.array(tail_lengths, dtype=np.int32)
        self._parent = np.array(parent, dtype=np.int32)
        self._trunk_reads = np.array([index for _, index in trunk_reads], dtype=np.int32)
        self.owners += [(part, part.first, 1) for part, _ in trunk_reads]
        lengths = np.concatenate([self._trunk_lengths, self._tail_lengths])
        needs_slots = bool(tail_lengths or self.saves)
        self.shape = Shape(
            tokens=int(lengths.sum()),
            trunks=len(trunk_lengths),
            tails=len(tail_lengths),
            chunks=int((-(-lengths // CHUNK)).sum()),
            tiles=int((-(-lengths // self.tile)).sum()),
            reads=len(tail_lengths) + len(trunk_reads),
            slots=len(self.shares) if needs_slots else 0,
        )

    def starts_from(self, root: Carry | None) -> bool:
        """Whether no trunk starts from another carry than the root's, and none leaves one."""
        return not self.saves and all(carry is root for carry in self.carries)

    def tables(self, shape: Shape | None = None) -> Tables:
        """Fill tables of the given shape (this pass's own by default); what lies beyond the pass is read by nothing."""
        out = Tables(shape or self.shape, self.tile)
        trunks, tails, room = self.shape.trunks, self.shape.tails, out.shape.trunks
        lengths = np.zeros(room + out.shape.tails + 1, dtype=np.int32)
        lengths[:trunks] = self._trunk_lengths
        lengths[room : room + tails] = self._tail_lengths
        out.borders[1:] = np.cumsum(lengths)
        starts = out.borders[:-1]
        tail_at = room + np.arange(tails)

        has_parent = self._trunk_lengths[self._parent] > 0
        started = np.array([share.start for share in self.shares], dtype=np.int32)
        base = np.zeros_like(lengths)
        base[:trunks] = started
        base[tail_at] = np.array([share.stop for share in self.shares], dtype=np.int32)[self._parent]

        self._fill_tokens(out, lengths, base)
        self._fill_before(out, tail_at)

        number = np.arange(trunks, dtype=np.int32)
        out.enter[:] = NOTHING
        out.leave[:] = NOTHING
        behind = np.where(self._carry >= 0, -2 - self._carry, NOTHING)
        out.enter[:trunks] = behind
        out.enter[tail_at] = np.where(has_parent, self._parent, behind[self._parent])
        leaves = np.zeros(trunks, dtype=bool)
        leaves[self._parent] = True
        leaves[[index for index, _ in self.saves]] = True
        out.leave[:trunks] = np.where(leaves & (self._trunk_lengths > 0), number, NOTHING)

        self._fill_chunks(out, lengths, starts)
        last_rows = np.concatenate([starts[tail_at] + self._tail_lengths, starts[self._trunk_reads]]).astype(np.int32)
        last_rows[tails:] += self._trunk_lengths[self._trunk_reads]
        out.reads[: len(last_rows)] = last_rows - 1

        prefix_row, prefix_count, carried = (np.zeros_like(lengths) for _ in range(3))
        carried[:trunks] = started
        carried[tail_at] = started[self._parent]
        prefix_row[tail_at] = starts[self._parent]
        prefix_count[tail_at] = self._trunk_lengths[self._parent]
        carry = np.zeros_like(lengths)
        carry[:trunks] = np.maximum(self._carry, 0)
        carry[tail_at] = carry[self._parent]
        facts = np.stack([starts, prefix_row, prefix_count, carry, carried], axis=1)

        of, nth = _spread(-(-lengths // self.tile))
        offset = nth * self.tile
        count = np.minimum(lengths[of] - offset, self.tile)
        tiles = np.concatenate([np.stack([starts[of] + offset, count, offset], axis=1), facts[of]], axis=1)
        # The longest tiles first, so that none is left running alone at the end.
        out.tiles[: len(of)] = tiles[np.argsort(-(offset + prefix_count[of] + carried[of]), kind="stable")]
        ends = np.concatenate([tail_at, self._trunk_reads]).astype(np.intp)
        row = np.arange(len(ends))
        out.last_tiles[: len(ends)] = np.concatenate(
            [np.stack([row, np.ones_like(row), lengths[ends] - 1], axis=1), facts[ends]], axis=1
        )
        return out

    def _fill_tokens(self, out: Tables, lengths: Ints, base: Ints) -> None:
        used = self.shape.tokens
        pieces = [share.part.trunk[share.start : share.stop] for share in self.shares]
        for share in self.shares:
            pieces += share.part.tails[share.first : share.last]
        out.ids[:used] = np.concatenate(pieces)
        of, nth = _spread(lengths)
        out.positions[:used] = base[of] + nth

    def _fill_before(self, out: Tables, tail_at: npt.NDArray[np.intp]) -> None:
        """Rows of the inputs before each segment: the end of a tail's trunk, or of what the trunk continues."""
        trunks = self.shape.trunks
        steps = np.arange(1, WINDOW + 1, dtype=np.int32)
        out.before[:] = NOTHING
        carry = self._carry[:, None]
        out.before[:trunks] = np.where(carry >= 0, -2 - (carry * WINDOW + WINDOW - steps), NOTHING)
        length = self._trunk_lengths[self._parent][:, None]
        beyond = np.clip(steps - length - 1, 0, WINDOW - 1)
        inherited = np.take_along_axis(out.before[:trunks][self._parent], beyond, axis=1)
        ends = (out.borders[:-1][self._parent])[:, None] + length
        out.before[tail_at] = np.where(steps <= length, ends - steps, inherited)

    def _fill_chunks(self, out: Tables, lengths: Ints, starts: Ints) -> None:
        chunks = -(-lengths // CHUNK)
        out.first_chunk[:] = np.cumsum(chunks) - chunks
        of, nth = _spread(chunks)
        used = len(of)
        out.chunk_of[:, 0] = len(lengths) - 1
        out.chunk_of[:used] = np.stack([of, nth], axis=1)
        out.chunk_rows[:used, 0] = starts[of] + nth * CHUNK
        out.chunk_rows[:used, 1] = np.minimum(lengths[of] - nth * CHUNK, CHUNK)


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """For counts [n]: the owner of each of sum(counts) entries and its number within the owner."""
    of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = np.cumsum(counts) - counts
    return of, (np.arange(len(of)) - first[of]).astype(np.int32)
