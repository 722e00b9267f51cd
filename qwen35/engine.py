"""The engine: requests in, hidden states of their questions' last positions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from . import forward, reference, weights
from .pack import MIN_SLICE, Forked, Part, Plan, Tables, divide, parts_of

MAX_TAILS = 1024
"""Tails in one pass: each costs at least one 1 MiB DeltaNet chunk, whatever its length."""
QUERY_TILE_ROWS = 128
"""Rows of one attention tile: tokens times the query heads that share a key-value head."""


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

    @torch.inference_mode()
    def hidden(self, batch: Sequence[Forked]) -> Tensor:
        """Hidden states after the final norm at every tail's last position, [all tails in order, hidden].

        Runs as many passes as the token budget asks for.
        """
        jobs = [self.open(request) for request in batch]
        while not all(job.finished for job in jobs):
            self.step(jobs)
        return torch.cat([job.hidden for job in jobs])

    def open(self, request: Forked) -> Job:
        """Begin a request. Raises ValueError when it has no tails or an empty one."""
        parts = parts_of(request, self.token_budget)
        reads = sum(part.reads for part in parts)
        return Job(parts, torch.empty(reads, self.geometry.hidden, dtype=self.dtype, device=self.device))

    @torch.inference_mode()
    def step(self, jobs: Sequence[Job]) -> list[Job]:
        """One pass of at most token_budget tokens; returns the jobs that it finished.

        Earlier jobs take first. A trunk that does not fit advances by a slice and keeps its state in the job. If the
        pass raises, no job has moved.
        """
        open_jobs = [job for job in jobs if not job.finished]
        shares = divide([part for job in open_jobs for part in job.parts], self.token_budget, MAX_TAILS)
        if not shares:
            return []
        plan = Plan(shares, self.tile)
        states = self._run(plan)
        homes = {id(part): job for job in open_jobs for part in job.parts}
        for row, (part, index) in enumerate(plan.owners):
            homes[id(part)].hidden[index] = states[row]
        for share in shares:
            share.part.done, share.part.next_tail = share.stop, share.last
            if share.part.finished:
                share.part.carry = None
        finished = [job for job in open_jobs if all(part.finished for part in job.parts)]
        for job in finished:
            job.finished = True
        return finished

    def head_rows(self, ids: Sequence[int]) -> Tensor:
        """Rows of the output head for these token ids, [n, hidden] float32."""
        return self.weights.head[torch.tensor(ids, dtype=torch.long, device=self.device)].float()

    def _run(self, plan: Plan) -> Tensor:
        tables = plan.tables()
        moved = Tables(tables.shape, self.tile, torch.from_numpy(tables.buffer).to(self.device))
        g = self.geometry
        states = torch.empty(
            plan.shape.slots, g.value_heads, g.key, g.value, dtype=torch.float32, device=self.device
        )
        luggage = forward.Luggage.of(self.weights, plan) if plan.carried else None
        out = forward.run(self.weights, moved, states, self.pieces, luggage)
        if luggage:
            luggage.commit()
        return out
