"""A bounded queue of requests in front of an engine, and the one thread that owns the device."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import wire
from answers import Decision, Scores, Temperatures, build_decision
from prompts import Prompts
from wire import BlinkError

log = logging.getLogger("blink")

_LEFT_POLL_S = 0.05


class BlinkBusy(BlinkError):
    """The queue is full or closing: try again in a second (503)."""

    def __init__(self, message: str) -> None:
        refused = wire.busy(message)
        super().__init__(message, refused.detail, status=refused.status, headers=refused.headers)


def wait_for(done: threading.Event, deadline: float, client_left: Callable[[], bool]) -> None:
    """Return when a decision is done; `client_left` is asked every 50 ms.

    Raises:
        BlinkError: 504 at the deadline, a time of the monotonic clock; 499 if the client left.
    """
    while not done.wait(min(_LEFT_POLL_S, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise wire.refusal(504, "timeout", "the decision was not done in time")
        if client_left():
            raise wire.refusal(499, "client_closed_request", "the client left")


class Job(Protocol):
    """A request on its way through the passes."""

    @property
    def left(self) -> int: ...


class Pass(Protocol):
    """A pass that the device may still be at: the jobs it finishes, and what became of them once it is done."""

    @property
    def jobs(self) -> Sequence[Any]: ...

    def wait(self) -> None: ...

    def done(self) -> bool: ...

    def outcomes(self) -> Sequence[Scores | Exception]: ...


class Engine(Protocol):
    """What a `Batcher` needs: `prepare` from any thread, the rest from the one thread that owns the device."""

    temperatures: Temperatures
    token_budget: int

    def prepare(self, request: wire.DecisionRequest) -> Prompts: ...

    def open(self, prompts: Prompts) -> Any: ...

    def step(self, jobs: Sequence[Any]) -> Pass: ...


@dataclass(eq=False, slots=True)
class _Entry:
    """A request on its way; the worker fills the job, the outcome and the times, then sets `done`."""

    prompts: Prompts
    queued_at: float
    job: Any = None
    landing: bool = False  # the pass that finishes it was started
    withdrawn: bool = False  # nobody waits for it any more
    started_at: float = 0.0
    finished_at: float = 0.0
    outcome: Scores | Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def left(self) -> int:
        """Tokens still to be read."""
        return int(self.job.left) if self.job is not None else self.prompts.stream_tokens

    def finish(self, outcome: Scores | Exception) -> None:
        self.outcome = outcome
        self.finished_at = time.monotonic()
        self.done.set()


@dataclass(slots=True)
class _Flight:
    """A pass that was started, and the entries that it finishes."""

    made: Pass
    entries: list[_Entry]
    requests: int
    tokens: int
    started_at: float


class Batcher:
    """A bounded queue in front of an engine, and the one thread that owns the device.

    Requests that arrive within `window_s` of the first are decided together, up to `max_requests` and the engine's
    token budget. Without a window whatever is queued when the device is free is decided together; with
    `max_requests=1` requests are decided one at a time in order of arrival.

    Args:
        engine: scores the prompts; only the worker thread calls its `score`.
        window_s: how long the first request of a batch waits for others, in seconds.
        max_requests: most requests of a batch.
        max_queued: most requests that wait; one more is refused with `BlinkBusy`.
        stuck_s: a pass that takes longer counts as hanging; until it ends the batcher is not alive.
        on_batch: told requests, tokens and seconds of every batch, from the worker thread.
        on_death: called once from the worker thread if it ends by a fault.
    """

    def __init__(
        self,
        engine: Engine,
        window_s: float = 0.0,
        max_requests: int = 1,
        *,
        max_queued: int = 64,
        stuck_s: float = math.inf,
        on_batch: Callable[[int, int, float], None] | None = None,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        if not (math.isfinite(window_s) and window_s >= 0 and max_requests >= 1 and max_queued >= 1):
            raise ValueError("window_s should be at least 0, max_requests and max_queued at least 1")
        self.window_s = window_s
        self.max_requests = max_requests
        self.max_queued = max_queued
        self.stuck_s = stuck_s
        self._engine = engine
        self._on_batch = on_batch
        self._on_death = on_death
        self._queue: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._running: list[_Entry] = []
        self._shortest_first = False
        self._pass_since: float | None = None
        self._closing = False
        self._dead = False
        self._worker = threading.Thread(target=self._run, name="blink-worker", daemon=True)
        self._worker.start()

    def submit(self, state: Any, questions: Mapping[str, Any]) -> dict[str, Any]:
        """Decide as `TorchEngine.decide` does, in turn with other threads' requests.

        Raises:
            BlinkBusy: the queue is full, or the batcher is closed or dead.
            BlinkError: the request is not valid or too long.
            EngineError: the pass failed.
        """
        return self.decide(wire.validate({"state": state, "questions": questions})).as_dict()

    def decide(
        self,
        request: wire.DecisionRequest,
        *,
        timeout_s: float = math.inf,
        client_left: Callable[[], bool] = lambda: False,
    ) -> Decision:
        """Decide a checked request; rendering and answer building run in the calling thread.

        Args:
            request: what to decide.
            timeout_s: how long to wait for the scores.
            client_left: asked every 50 ms; a request nobody waits for is taken off the queue.

        Raises:
            BlinkBusy: as for `submit`.
            BlinkError: 422 if the request is too long for the model, 504 on a timeout, 499 if the client left.
            EngineError: the pass failed.
        """
        began = time.monotonic()
        if self.queued() >= self.max_queued:
            raise BlinkBusy("the queue is full")  # before tokenizing, which costs more than the refusal
        prompts = self._engine.prepare(request)
        entry = self._admit(prompts)
        try:
            wait_for(entry.done, began + timeout_s, client_left)
        except BlinkError:
            self._withdraw(entry)
            raise
        if isinstance(entry.outcome, Exception):
            raise entry.outcome
        assert entry.outcome is not None
        answering = time.monotonic()
        decision = build_decision(request, prompts, entry.outcome, self._engine.temperatures)
        decision.seconds = {
            "render": entry.queued_at - began,
            "queue": entry.started_at - entry.queued_at,
            "forward": entry.finished_at - entry.started_at,
            "answer": time.monotonic() - answering,
        }
        return decision

    def alive(self) -> bool:
        """Whether the worker still decides."""
        since = self._pass_since
        stuck = since is not None and time.monotonic() - since > self.stuck_s
        return not stuck and not self._dead and self._worker.is_alive()

    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Refuse new requests, decide what waits, end the worker; true if it ended in time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join(timeout_s)
        return not self._worker.is_alive()

    def _admit(self, prompts: Prompts) -> _Entry:
        entry = _Entry(prompts, time.monotonic())
        with self._changed:
            if self._dead or self._closing:
                raise BlinkBusy("the server is stopping")
            if len(self._queue) >= self.max_queued:
                raise BlinkBusy("the queue is full")
            self._queue.append(entry)
            self._changed.notify_all()
        return entry

    def _withdraw(self, entry: _Entry) -> None:
        with self._changed:
            entry.withdrawn = True
            if entry in self._queue:
                self._queue.remove(entry)

    def _run(self) -> None:
        try:
            self._fly()
        except BaseException as error:
            log.error("the decision worker died: %s (--log-level debug tells more)", type(error).__name__)
            log.debug("the decision worker died", exc_info=error)
            with self._changed:
                self._dead = True
                lost = [*self._running, *self._queue]
                self._queue.clear()
            for entry in lost:
                if not entry.done.is_set():
                    entry.finish(BlinkBusy("the decision worker died"))
            if self._on_death is not None:
                self._on_death()

    def _fly(self) -> None:
        """Whenever the device is free start the next pass, and only then hand out the results of the last one.

        Results that are there when `step` returns, as on a CPU, are handed out at once: they would otherwise wait for
        the whole next pass.
        """
        flight: _Flight | None = None
        while True:
            if flight is not None:
                flight.made.wait()
            entries = self._gather(block=flight is None)
            upcoming = self._start(entries) if entries else None
            if flight is not None:
                self._land(flight)
            flight = upcoming
            if flight is not None and flight.made.done():
                self._land(flight)
                flight = None
            if flight is None:
                self._pass_since = None
            if flight is None and self._closing and not self._queue and not self._running:
                return

    def _gather(self, *, block: bool) -> list[_Entry]:
        """The requests of the next pass, in the order in which they take from its tokens.

        In turn the oldest or the shortest goes first: so a long request moves on at least every other pass, and a
        short one waits for no more than one slice of a long one.
        """
        with self._changed:
            while block and not self._running and not self._closing and not self._due():
                since = self._queue[0].queued_at if self._queue else None
                self._changed.wait(None if since is None else since + self.window_s - time.monotonic())
            if self._due():
                self._take()
            self._running = [entry for entry in self._running if entry.landing or not entry.withdrawn]
            entries = [entry for entry in self._running if not entry.landing]
        self._shortest_first = not self._shortest_first
        return sorted(entries, key=lambda entry: entry.left) if self._shortest_first else entries

    def _due(self) -> bool:
        if not self._queue:
            return False
        waited = time.monotonic() - self._queue[0].queued_at
        return self._closing or waited >= self.window_s or len(self._queue) >= self.max_requests

    def _take(self) -> None:
        """Move requests from the queue into the passes: the token budget's worth, and one that is longer than it."""
        budget = self._engine.token_budget
        under_way = [entry.left for entry in self._running if not entry.landing]
        requests = len(under_way)
        tokens = sum(left for left in under_way if left <= budget)
        has_long = any(left > budget for left in under_way)
        for entry in list(self._queue):
            is_long = entry.left > budget
            if requests >= self.max_requests or (not is_long and tokens and tokens + entry.left > budget):
                return
            if is_long and has_long:
                continue
            self._queue.remove(entry)
            self._running.append(entry)
            requests += 1
            tokens += 0 if is_long else entry.left
            has_long |= is_long

    def _start(self, entries: list[_Entry]) -> _Flight | None:
        """Start a pass over the entries; if it fails as a whole, each is tried alone and fails alone."""
        started = self._pass_since = time.monotonic()
        before = sum(entry.left for entry in entries)
        try:
            for entry in entries:
                if entry.job is None:
                    entry.job = self._engine.open(entry.prompts)
                    entry.started_at = started
            made = self._engine.step([entry.job for entry in entries])
        except torch.AcceleratorError:  # the device is lost: nothing after it can be trusted
            raise
        except Exception as error:
            if len(entries) == 1:
                self._running.remove(entries[0])
                entries[0].finish(error)
                return None
            log.warning("a pass over %d requests failed (%s): each is tried alone", len(entries), type(error).__name__)
            for entry in entries:
                if flight := self._start([entry]):
                    self._land(flight)
            return None
        owners = {id(entry.job): entry for entry in entries}
        finished = [owners[id(job)] for job in made.jobs]
        for entry in finished:
            entry.landing = True
        after = sum(entry.left for entry in entries if not entry.landing)
        return _Flight(made, finished, len(entries), before - after, started)

    def _land(self, flight: _Flight) -> None:
        for entry, outcome in zip(flight.entries, flight.made.outcomes(), strict=True):
            self._running.remove(entry)
            entry.finish(outcome)
        if self._on_batch is not None:
            self._on_batch(flight.requests, flight.tokens, time.monotonic() - flight.started_at)
