"""The engine: requests in, hidden states of their questions' last positions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from . import forward, graphs, reference, weights
from .pack import MIN_SLICE, QUERY_TILE_ROWS, Forked, Part, Plan, Root, Share, Tables, divide, parts_of

MAX_TAILS = 1024
"""Tails in one pass: each costs at least one 1 MiB DeltaNet chunk, whatever its length."""
EAGER_WARM_UP = (64, 512, 2304, 4096, 6144, 8192)
"""Tokens of the eager passes that the warm-up runs, for the matrix library's kernels of each size."""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. hidden: [tails, hidden] once `finished`, on the engine's device, in the engine's dtype."""

    parts: list[Part]
    hidden: Tensor
    finished: bool = False

    @property
    def left(self) -> int:
        """Tokens still to be read."""
        return sum(part.left for part in self.parts)


def unsupported(folder: Path, device: torch.device) -> str | None:
    """Why the fast pass does not fit this folder on this device; None when it does."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no CUDA device"
    try:
        geometry = weights.Geometry.of(folder)
        from . import kernels
    except (ValueError, OSError, ImportError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return kernels.misfit(geometry, device)


class Qwen35Engine:
    """Qwen3.5 decoder over packed passes. One thread at a time may use it.

    On the CPU the same packing runs through transformers' reference operators.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.bfloat16,
        token_budget: int = 12_288,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load `folder` onto `device`. token_budget: tokens of the largest pass, which bounds peak memory.

        `progress` gets the share of the weights read, 0 to 1. Raises ValueError when the architecture does not fit.
        """
        if token_budget < MIN_SLICE:
            raise ValueError(f"token_budget must be at least {MIN_SLICE}")
        self.device = device
        self.dtype = dtype
        self.token_budget = token_budget
        self.weights = weights.load(folder, device, dtype, progress)
        self.geometry = self.weights.geometry
        self.tile = max(1, QUERY_TILE_ROWS // self.geometry.group)
        self.pieces: ModuleType = reference
        if device.type == "cuda":
            from . import kernels  # imports Triton, which a machine without a GPU need not have

            self.pieces = kernels
        self._ladder: graphs.Ladder | None = None
        self._root: Root | None = None
        self._held = forward.Held.of(self.weights, [])

    @torch.inference_mode()
    def hidden(self, batch: Sequence[Forked]) -> Tensor:
        """Hidden states after the final norm at every tail's last position, [all tails in order, hidden].

        Runs as many passes as the token budget asks for.
        """
        jobs = [self.open(request) for request in batch]
        while not all(job.finished for job in jobs):
            self.step(jobs)
        return torch.cat([job.hidden for job in jobs])

    @torch.inference_mode()
    def keep_root(self, ids: Sequence[int]) -> None:
        """Encode ids that most requests begin with and keep their state: later requests start behind them.

        Requests that begin otherwise are served as before. Before `warm_up`, because graphs are tied to the root.
        """
        if self._ladder is not None:
            raise RuntimeError("the root is kept before the warm-up")
        if not 0 < len(ids) <= self.token_budget:
            raise ValueError("a root has at least one id and fits a pass")
        trunk = np.array([*ids, 0], dtype=np.int32)  # one more id, so that the pass leaves a carry
        part = Part(trunk, [], reads_trunk=False, first=0)
        self._pass(Plan([Share(part, 0, len(ids), 0, 0)], self.tile))
        assert part.carry is not None
        part.carry.shared = True
        self._root = Root(trunk[:-1], part.carry)
        self._held = forward.Held.of(self.weights, [part.carry])

    def open(self, request: Forked) -> Job:
        """Begin a request. Raises ValueError when it has no tails or an empty one."""
        parts = parts_of(request, self.token_budget, self._root)
        reads = sum(part.reads for part in parts)
        return Job(parts, torch.empty(reads, self.geometry.hidden, dtype=self.dtype, device=self.device))

    @torch.inference_mode()
    def step(self, jobs: Sequence[Job], budget: int | None = None) -> list[Job]:
        """One pass of at most `budget` tokens (token_budget by default); returns the jobs that it finished.

        Earlier jobs take first. A trunk that does not fit advances by a slice and keeps its state in the job. The
        device may still be at work when this returns. If the pass raises, no job has moved.
        """
        waiting = [job for job in jobs if not job.finished]
        shares = divide([part for job in waiting for part in job.parts], budget or self.token_budget, MAX_TAILS)
        if not shares:
            return []
        plan = Plan(shares, self.tile)
        states = self._pass(plan)
        homes = {id(part): job for job in waiting for part in job.parts}
        row = 0
        for part, first, count in plan.owners:
            homes[id(part)].hidden[first : first + count] = states[row : row + count]
            row += count
        for share in shares:
            share.part.done, share.part.next_tail = share.stop, share.last
            if share.part.finished:
                share.part.carry = None
        finished = [job for job in waiting if all(part.finished for part in job.parts)]
        for job in finished:
            job.finished = True
        return finished

    def head_rows(self, ids: Sequence[int]) -> Tensor:
        """Rows of the output head for these token ids, [n, hidden] float32."""
        return self.weights.head[torch.tensor(ids, dtype=torch.long, device=self.device)].float()

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[float], None] | None = None) -> None:
        """Compile every kernel, touch the memory of the largest pass and capture the graphs; on the CPU do nothing.

        After it no request waits for a compilation. `progress` gets the share done, 0 to 1.
        """
        if self.device.type != "cuda":
            return
        report = progress or (lambda share: None)
        sliced = self.open(Forked(range(2 * MIN_SLICE), [[1], [2]]))
        while not sliced.finished:
            self.step([sliced], budget=MIN_SLICE)
        for tokens in EAGER_WARM_UP:
            if tokens <= self.token_budget:
                self.hidden([Forked([1] * (tokens - 128), [[2] * 64] * 2)])
        self.hidden([Forked([1] * (self.token_budget - 128), [[2] * 64] * 2)])
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        report(0.5)
        g = self.geometry
        rungs = list(graphs.shapes(self.tile))
        slots = max(shape.slots for shape in rungs)
        states = torch.zeros(slots, g.value_heads, g.key, g.value, dtype=torch.float32, device=self.device)
        ladder = graphs.Ladder(self._capture, self.tile, states)
        for done, shape in enumerate(rungs, start=1):
            ladder.capture(shape)
            report(0.5 + 0.5 * done / len(rungs))
        self._ladder = ladder
        self.hidden([Forked([1] * 64, [[2] * 64])])
        torch.cuda.synchronize(self.device)

    @property
    def kernels(self) -> str:
        """What computes: the library's name and version, or the reference."""
        if self.device.type != "cuda":
            return "reference"
        return f"flash-linear-attention {version('flash-linear-attention')}"

    def _pass(self, plan: Plan) -> Tensor:
        usual = plan.starts_from(self._root.carry if self._root else None)
        if self._ladder is not None and usual:
            out = self._ladder.replay(plan)
            if out is not None:
                return out
        tables = plan.tables()
        buffer = torch.from_numpy(tables.buffer)
        if self.device.type == "cuda":
            buffer = buffer.pin_memory().to(self.device, non_blocking=True)
        g = self.geometry
        states = torch.empty(plan.shape.slots, g.value_heads, g.key, g.value, dtype=torch.float32, device=self.device)
        luggage = forward.Luggage.of(self.weights, plan, tables.borders.tolist()) if plan.saves else None
        held = self._held if usual else forward.Held.of(self.weights, plan.carries)
        moved = Tables(tables.shape, self.tile, buffer)
        out = forward.run(self.weights, moved, states, self.pieces, held, luggage)
        if luggage:
            luggage.commit()
        return out

    def _capture(self, tables: Tables, states: Tensor) -> Tensor:
        return forward.run(self.weights, tables, states, self.pieces, self._held)
