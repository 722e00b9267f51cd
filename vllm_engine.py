"""vLLM's asynchronous engine behind the face that the HTTP side knows: many threads decide, one event loop asks vLLM.

Every question is one vLLM request of one token: its whole prompt, only labels allowed, their log-probabilities wanted.
All requests allow the same ids, every label that the tokenizer has, and the softmax over the labels that a question
offers follows here: it is the same to rounding, whatever the other labels have. Allowing each request its own labels
would do with less, but vLLM's batches mix up their rows' masks when requests change places (its issue 43894 and pull
request 48419, open as of 0.30.0): equal masks cannot be mixed up.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import wire
from answers import Decision, Scores, build_decision
from batcher import BlinkBusy, wait_for
from prompts import PromptEncoder, Prompts, check_length, small_request
from reference import EngineError
from wire import LIMITS, BlinkError

log = logging.getLogger("blink")

WATCH_S = 0.5
CANCEL_S = 5.0
SHUTDOWN_S = 20.0
_SUM_TOLERANCE = 1e-3  # of all labels' probabilities, far above what float32 loses


class AsyncEngine(Protocol):
    """What is used of `vllm.v1.engine.async_llm.AsyncLLM`, all of it from the loop that made it."""

    vllm_config: Any

    @property
    def errored(self) -> bool: ...

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]: ...

    def abort(self, request_id: str) -> Coroutine[Any, Any, None]: ...

    def shutdown(self, timeout: float | None = None) -> None: ...


def label_sampling(labels: Sequence[int]) -> Any:
    """Sampling parameters that ask vLLM for the log-probabilities of these token ids, and of no others."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1,
        temperature=1.0,
        allowed_token_ids=list(labels),
        logprobs=len(labels),
        detokenize=False,
    )


def label_scores(output: Any, labels: Sequence[int]) -> list[float]:
    """Log-probabilities of these token ids, in their order, from vLLM's finished output.

    Raises:
        BlinkBusy: vLLM gave the request up.
        EngineError: one is missing or not finite, or they are over other ids as well.
    """
    completion = output.outputs[0] if output is not None and output.outputs else None
    if completion is not None and completion.finish_reason == "abort":
        raise BlinkBusy("the engine is stopping")
    if completion is None or not completion.logprobs:
        raise EngineError("vLLM gave no log-probabilities")
    found = completion.logprobs[0]
    if any(label not in found for label in labels):
        raise EngineError("vLLM left out a label")
    scores = [float(found[label].logprob) for label in labels]
    if not all(map(math.isfinite, scores)):
        raise EngineError("vLLM gave log-probabilities that are not finite")
    if abs(math.fsum(map(math.exp, scores)) - 1) > _SUM_TOLERANCE:
        raise EngineError("vLLM's log-probabilities are not over the labels alone")
    return scores


@dataclass(eq=False, slots=True)
class _Entry:
    """A request that vLLM has; the loop fills the task and the outcome, then sets `done`."""

    prompts: Prompts
    task: "asyncio.Task[Scores] | None" = None
    outcome: Scores | Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class VllmDecider:
    """Decides from many threads through one asynchronous engine, which lives in an event loop of its own thread.

    Args:
        make_engine: makes the engine; called once in the loop's thread.
        encoder: renders and tokenizes requests.
        max_model_len: vLLM's context in tokens. A prompt may have one less: the last one is the label's.
        max_concurrency: most requests at a time; one more is refused with `BlinkBusy`.
        max_questions: most questions of one request that vLLM has at a time; each is a whole prompt in memory.
        temperature: divides the label scores before the softmax.
        on_death: called once from the loop's thread if the engine dies.
        sampling: makes the sampling parameters of every request from the labels' ids.

    Raises:
        Exception: whatever `make_engine` raises.
    """

    def __init__(
        self,
        make_engine: Callable[[], AsyncEngine],
        encoder: PromptEncoder,
        *,
        max_model_len: int,
        max_concurrency: int,
        max_questions: int = 64,
        temperature: float = 1.0,
        on_death: Callable[[], None] | None = None,
        sampling: Callable[[Sequence[int]], Any] = label_sampling,
    ) -> None:
        self.context = min(LIMITS.tokens_per_question, max_model_len - 1)
        self.max_concurrency = max_concurrency
        self.max_questions = max_questions
        self.temperature = temperature
        self._make_engine = make_engine
        self._encoder = encoder
        self._on_death = on_death
        self._sampling = sampling(encoder.label_ids)
        self._numbers = itertools.count()
        self._entries: set[_Entry] = set()
        self._changed = threading.Condition()
        self._places_taken = 0
        self._closing = False
        self._dead = False
        self._ended = False
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blink-vllm", daemon=True)
        self._thread.start()
        while not self._started.wait(0.2):  # the interpreter runs signal handlers between waits
            pass
        if self._failure is not None:
            raise self._failure

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

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
            client_left: asked every 50 ms; what vLLM has of a request nobody waits for is aborted.

        Raises:
            BlinkBusy: as many requests as may be are under way, or the engine is stopping or dead.
            BlinkError: 422 if a question is too long, 504 on a timeout, 499 if the client left.
            EngineError: vLLM failed, or gave scores that cannot be answered with.
        """
        began = time.monotonic()
        entry = self._send(request)
        sent = time.monotonic()
        try:
            wait_for(entry.done, began + timeout_s, client_left)
        except BlinkError:
            self._on_loop(self._cancel, entry)
            raise
        if isinstance(entry.outcome, Exception):
            raise entry.outcome
        assert entry.outcome is not None
        answering = time.monotonic()
        decision = build_decision(request, entry.prompts, entry.outcome, self.temperature)
        decision.seconds = {
            "render": sent - began,
            "forward": answering - sent,
            "answer": time.monotonic() - answering,
        }
        return decision

    def warm_up(self) -> bool:
        """Decide a small request twice; true if both answers are the same to the bit.

        Raises:
            BlinkError: as `decide`.
        """
        first, second = (self.decide(small_request()).as_dict()["answers"] for _ in range(2))
        return bool(first == second)

    def alive(self) -> bool:
        """Whether the engine still decides."""
        return not self._dead and self._thread.is_alive()

    def queued(self) -> int:
        """Requests that wait for their answer; which of them are read at once is vLLM's to say."""
        return self._places_taken

    def close(self, timeout_s: float = 30.0) -> bool:
        """Refuse new requests, wait for what is under way, end the engine; true if everything ended in time."""
        with self._changed:
            self._closing = True
            finished = self._changed.wait_for(lambda: not self._places_taken, timeout_s)
        self._on_loop(self._stopping.set)
        self._thread.join(SHUTDOWN_S)
        return finished and not self._thread.is_alive()

    # --- in the caller's thread --------------------------------------------------------------------------------------

    def _send(self, request: wire.DecisionRequest) -> _Entry:
        """Take a place and hand the request to the loop, which gives the place back when it is through with it."""
        with self._changed:
            if self._dead or self._closing:
                raise BlinkBusy("the server is stopping")
            if self._places_taken >= self.max_concurrency:
                raise BlinkBusy(f"{self.max_concurrency} requests are under way")
            self._places_taken += 1
        try:
            prompts = self._encoder.encode(request)
            check_length(request, prompts, self.context)
        except BaseException:
            self._leave()
            raise
        entry = _Entry(prompts)
        with self._changed:
            if self._ended:
                self._places_taken -= 1
                raise BlinkBusy("the engine died")
            self._entries.add(entry)  # from here on the loop's thread answers for it, also if it ends
            self._on_loop(self._start, entry)
        return entry

    def _on_loop(self, call: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everything on it
            self._loop.call_soon_threadsafe(call, *args)

    def _leave(self) -> None:
        with self._changed:
            self._places_taken -= 1
            self._changed.notify_all()

    # --- in the loop's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                self._die()
        finally:
            self._started.set()
            with self._changed:
                self._ended = True
            for entry in list(self._entries):
                self._finish(entry, BlinkBusy("the engine died"))

    async def _serve(self) -> None:
        """Make the engine and keep watch over it until it is closed or dies."""
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._engine = self._make_engine()
        self._started.set()
        try:
            while not self._engine.errored and not self._stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), WATCH_S)
            if self._engine.errored and not self._closing:
                self._die()
            deadline = time.monotonic() + CANCEL_S
            while self._entries and time.monotonic() < deadline:
                for entry in list(self._entries):
                    self._cancel(entry)
                await asyncio.sleep(0.01)
        finally:
            self._engine.shutdown(SHUTDOWN_S / 2)

    def _die(self) -> None:
        with self._changed:
            if self._dead:
                return
            self._dead = True
        log.error("vLLM's engine died")
        if self._on_death is not None:
            self._on_death()

    def _start(self, entry: _Entry) -> None:
        entry.task = self._loop.create_task(self._score(entry.prompts))
        entry.task.add_done_callback(lambda task: self._finish(entry, self._outcome(task)))

    def _cancel(self, entry: _Entry) -> None:
        if entry.task is not None:
            entry.task.cancel()

    def _outcome(self, task: "asyncio.Task[Scores]") -> Scores | Exception:
        """What became of a task, also if it was cancelled before it began."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or (error is not None and not isinstance(error, Exception)):  # the loop is being ended
            return BlinkBusy("the engine died" if self._dead else "the server is stopping")
        return error if isinstance(error, Exception) else task.result()

    def _finish(self, entry: _Entry, outcome: Scores | Exception) -> None:
        with self._changed:
            self._entries.discard(entry)
        entry.outcome = outcome
        entry.done.set()
        self._leave()

    async def _score(self, prompts: Prompts) -> Scores:
        """Scores of all questions of a request; if one fails, vLLM is told to drop the others."""
        gate = asyncio.Semaphore(self.max_questions)

        async def ask(tail: list[int], count: int) -> list[float]:
            async with gate:
                return (await self._ask(prompts.prefix + tail))[:count]

        try:
            async with asyncio.TaskGroup() as group:
                asked = zip(prompts.tails, prompts.counts, strict=True)
                tasks = [group.create_task(ask(tail, count)) for tail, count in asked]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _ask(self, ids: list[int]) -> list[float]:
        """Log-probabilities of all labels after one prompt. Whatever ends this early aborts vLLM's request."""
        request_id = f"blink-{next(self._numbers)}"
        prompt = {"type": "token", "prompt_token_ids": ids}
        output: Any = None
        try:
            async for output in self._engine.generate(prompt, self._sampling, request_id):  # noqa: B007
                pass
        except Exception as error:
            if self._engine.errored:
                raise BlinkBusy("the engine died") from None
            raise EngineError(f"vLLM failed: {type(error).__name__}") from error
        finally:
            if (output is None or not output.finished) and not self._engine.errored:
                # vLLM itself aborts only what was cancelled once it had handed the request over.
                with contextlib.suppress(Exception):
                    await self._engine.abort(request_id)
        return label_scores(output, self._encoder.label_ids)
