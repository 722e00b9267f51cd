"""CUDA graphs on a ladder of token counts: small passes without launch overhead.

A pass of 700 tokens takes longer to launch than to compute, so passes up to `TOP` tokens replay a graph that is a
little wider than they are; what is beyond the pass is read by nothing. Wider passes are bound by arithmetic and run
eagerly. Steps of 32 tokens waste at most a twentieth of a pass above 640 tokens; a capture takes about 25 ms.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .pack import CHUNK, Plan, Shape, Tables

TOP = 2048
RUNGS = (*range(64, 1024, 32), *range(1024, TOP + 1, 128))
"""Token counts of the graphs."""
WIDTHS = ((1, 0), (2, 8), (24, 64))
"""Trunks and tails that a graph has room for: a lone question, one request, several. Empty places cost launches."""


def shapes(tile: int) -> Iterator[Shape]:
    """All rungs, widest first, so that the memory of the first serves the others."""
    for tokens in reversed(RUNGS):
        for trunks, tails in reversed(WIDTHS):
            segments = trunks + tails
            yield Shape(
                tokens=tokens,
                trunks=trunks,
                tails=tails,
                chunks=tokens // CHUNK + segments - (tails == 0),
                tiles=-(-tokens // tile) + segments - (tails == 0),
                reads=segments,
                slots=trunks if tails else 0,
            )


Rung = tuple[Shape, torch.cuda.CUDAGraph, Tables, Tensor]


def _shape(rung: Rung) -> tuple[int, ...]:
    return rung[0]


class Ladder:
    """Captured passes, found by shape. Replays overwrite each other's memory: what comes out is copied at once."""

    def __init__(self, run: Callable[[Tables, Tensor], Tensor], tile: int, states: Tensor) -> None:
        """run: the pass over device tables and states; states: working memory for the widest rung, kept for good."""
        self._run = run
        self._tile = tile
        self._states = states
        self._pool = torch.cuda.graph_pool_handle()
        self._rungs: list[Rung] = []  # in order of their tokens

    def __len__(self) -> int:
        return len(self._rungs)

    def capture(self, shape: Shape) -> None:
        """Add a rung. The kernels must have run before: nothing may compile or tune while a graph records."""
        blank = Tables(shape, self._tile)
        tables = Tables(shape, self._tile, torch.zeros(blank.length, dtype=torch.int32, device=self._states.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = self._run(tables, self._states[: shape.slots])
        insort(self._rungs, (shape, graph, tables, out), key=_shape)

    def replay(self, plan: Plan) -> Tensor | None:
        """The pass's hidden states [reads, hidden], or None when no rung holds it."""
        least: tuple[int, ...] = (plan.shape.tokens,)
        wide_enough = islice(self._rungs, bisect_left(self._rungs, least, key=_shape), None)
        rung = next((rung for rung in wide_enough if rung[0].holds(plan.shape)), None)
        if rung is None:
            return None
        shape, graph, tables, out = rung
        filled = torch.from_numpy(plan.tables(shape).buffer).pin_memory()
        buffer: Any = tables.buffer
        buffer.copy_(filled, non_blocking=True)
        graph.replay()
        return out[: plan.shape.reads].clone()
