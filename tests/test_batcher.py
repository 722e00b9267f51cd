"""The queue and its one worker, with engines whose time and faults the tests control."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from servers import wait_until

import wire
from answers import Scores, Temperatures
from blink import Batcher, BlinkBusy, BlinkError, EngineError
from prompts import Prompts

NOUL = {"q": {"type": "noul", "instructions": "?"}}


class Job:
    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts
        self.left = prompts.stream_tokens


class Pass:
    def __init__(self, jobs: Sequence[Job], outcomes: Sequence[Scores | Exception]) -> None:
        self.jobs = jobs
        self.ready = threading.Event()  # unless the device is still at it
        self.ready.set()
        self._outcomes = outcomes

    def wait(self) -> None:
        assert self.ready.wait(30)

    def done(self) -> bool:
        return self.ready.is_set()

    def outcomes(self) -> Sequence[Scores | Exception]:
        return self._outcomes


class GatedEngine:
    """Scores only while its gate is open, a slice of a long request a pass.

    A request's probability of yes follows from its state's length.
    """

    temperatures = Temperatures()

    def __init__(self, token_budget: int = 1_000_000) -> None:
        self.token_budget = token_budget
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.batches: list[int] = []
        self.finished: list[list[int]] = []
        self.fault: Callable[[Sequence[Prompts]], None] = lambda batch: None

    def prepare(self, request: wire.DecisionRequest) -> Prompts:
        return Prompts([0] * len(request.state), [[1]] * len(request.questions), [2] * len(request.questions))

    def open(self, prompts: Prompts) -> Job:
        return Job(prompts)

    def step(self, jobs: Sequence[Job]) -> Pass:
        self.batches.append(len(jobs))
        self.entered.release()
        assert self.gate.wait(30)
        self.fault([job.prompts for job in jobs])
        room = self.token_budget
        for job in jobs:
            taken = min(job.left, room)
            job.left -= taken
            room -= taken
        done = [job for job in jobs if not job.left]
        self.finished.append([len(job.prompts.prefix) for job in done])
        return Pass(done, [self.outcome(job.prompts) for job in done])

    def outcome(self, prompts: Prompts) -> Scores | Exception:
        return [[float(len(prompts.prefix)), 0.0] for _ in prompts.tails]


@pytest.fixture
def engine() -> Iterator[GatedEngine]:
    made = GatedEngine()
    yield made
    made.gate.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as made:
        yield made


def submit(pool: ThreadPoolExecutor, batcher: Batcher, length: int) -> Any:
    return pool.submit(batcher.submit, "x" * length, NOUL)


def fill(pool: ThreadPoolExecutor, batcher: Batcher, engine: GatedEngine, waiting: int) -> list[Any]:
    """One request in the pass, `waiting` in the queue, in order of their length."""
    futures = [submit(pool, batcher, 0)]
    assert engine.entered.acquire(timeout=20)
    for i in range(1, waiting + 1):
        futures.append(submit(pool, batcher, i))
        wait_until(lambda i=i: batcher.queued() == i)
    return futures


def expected(length: int) -> float:
    return float(torch.tensor([float(length), 0.0]).double().softmax(0)[0])


def check(futures: Sequence[Any]) -> None:
    for length, future in enumerate(futures):
        decision = future.result(30)
        assert decision["answers"]["q"]["noul"] == pytest.approx(expected(length))
        assert decision["meta"]["input_tokens"] == length + 1
        assert set(decision["meta"]["seconds"]) == {"render", "queue", "forward", "answer"}


def test_one_at_a_time_in_order(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(engine)
    futures = fill(pool, batcher, engine, 5)
    engine.gate.set()
    check(futures)
    assert engine.batches == [1] * 6
    assert batcher.close()


def hold(held: threading.Event) -> None:
    assert held.wait(30)


def test_results_that_are_there_do_not_wait_for_the_next_pass(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(engine)
    first, second = fill(pool, batcher, engine, 1)
    held = threading.Event()
    engine.fault = lambda batch: None if len(engine.batches) == 1 else hold(held)
    engine.gate.set()
    assert first.result(20)
    assert not second.done()
    held.set()
    assert second.result(20)


class Device(GatedEngine):
    """Goes on with a pass after `step` has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.set()
        self.passes: list[Pass] = []
        self.happened: list[str] = []

    def step(self, jobs: Sequence[Job]) -> Pass:
        made = super().step(jobs)
        made.ready.clear()
        self.passes.append(made)
        self.happened.append("started")
        return made


def test_the_next_pass_starts_before_results_are_handed_out(pool: ThreadPoolExecutor) -> None:
    device = Device()
    batcher = Batcher(device, on_batch=lambda requests, tokens, seconds: device.happened.append("handed out"))
    first, second = fill(pool, batcher, device, 1)
    assert device.batches == [1]
    device.passes[0].ready.set()
    assert first.result(20)
    device.passes[1].ready.set()
    assert second.result(20)
    wait_until(lambda: len(device.happened) == 4)
    assert device.happened == ["started", "started", "handed out", "handed out"]


def test_without_a_window_what_is_queued_goes_together(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(engine, 0.0, 64)
    futures = fill(pool, batcher, engine, 9)
    engine.gate.set()
    check(futures)
    assert engine.batches == [1, 9]


def test_a_window_gathers_up_to_its_most(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(engine, 20.0, 4)
    engine.gate.set()
    check([submit(pool, batcher, i) for i in range(8)])
    assert sorted(engine.batches) == [4, 4]


def test_a_window_ends(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(engine, 0.05, 4)
    engine.gate.set()
    check([submit(pool, batcher, 0)])
    assert engine.batches == [1]


def test_a_batch_keeps_the_token_budget(pool: ThreadPoolExecutor) -> None:
    engine = GatedEngine(token_budget=9)
    batcher = Batcher(engine, 0.0, 64)
    futures = fill(pool, batcher, engine, 5)  # streams of 2, 3, 4, 5 and 6 tokens
    engine.gate.set()
    check(futures)
    assert engine.batches == [1, 3, 1, 1]


def test_a_long_request_neither_holds_the_others_nor_starves(pool: ThreadPoolExecutor) -> None:
    engine = GatedEngine(token_budget=100)
    batcher = Batcher(engine, 0.0, 64)
    futures = [submit(pool, batcher, 0)]
    assert engine.entered.acquire(timeout=20)
    long = submit(pool, batcher, 990)
    wait_until(lambda: batcher.queued() == 1)
    other_long = submit(pool, batcher, 390)
    wait_until(lambda: batcher.queued() == 2)
    short = [submit(pool, batcher, 49) for _ in range(40)]
    wait_until(lambda: batcher.queued() == 42)
    engine.gate.set()
    for length, future in ((0, futures[0]), (990, long), (390, other_long), *((49, future) for future in short)):
        assert future.result(30)["answers"]["q"]["noul"] == pytest.approx(expected(length))
    order = [length for lengths in engine.finished for length in lengths]
    assert order.index(990) > order.index(49)
    assert order.index(990) < order.index(390)  # one long request at a time
    passes = [lengths for lengths in engine.finished if lengths.count(49)]
    assert all(lengths.count(49) == 2 for lengths in passes)  # each pass that took short ones was full of them
    assert order.index(990) < 30  # it moved on while short ones waited


def test_batches_are_reported(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    seen: list[tuple[int, int]] = []
    batcher = Batcher(engine, 0.0, 8, on_batch=lambda requests, tokens, seconds: seen.append((requests, tokens)))
    futures = fill(pool, batcher, engine, 2)
    engine.gate.set()
    check(futures)
    assert batcher.close()
    assert seen == [(1, 1), (2, 5)]


def test_a_full_queue_refuses(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(engine, max_queued=3)
    futures = fill(pool, batcher, engine, 3)
    with pytest.raises(BlinkBusy) as caught:
        batcher.submit("x", NOUL)
    assert caught.value.status == 503
    assert caught.value.headers == {"Retry-After": "1"}
    engine.gate.set()
    check(futures)
    check([submit(pool, batcher, 0)])


def test_invalid_requests_do_not_queue(engine: GatedEngine) -> None:
    batcher = Batcher(engine)
    with pytest.raises(BlinkError) as caught:
        batcher.submit("x", {})
    assert caught.value.status == 422
    assert engine.batches == []


def test_a_timeout_takes_the_request_off_the_queue(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(engine)
    futures = fill(pool, batcher, engine, 1)
    request = wire.validate({"state": "late", "questions": NOUL})
    with pytest.raises(BlinkError) as caught:
        batcher.decide(request, timeout_s=0.1)
    assert caught.value.status == 504
    assert batcher.queued() == 1
    engine.gate.set()
    check(futures)
    assert engine.batches == [1, 1]


def test_a_client_that_left_costs_no_pass(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(engine)
    futures = fill(pool, batcher, engine, 1)
    request = wire.validate({"state": "gone", "questions": NOUL})
    with pytest.raises(BlinkError) as caught:
        batcher.decide(request, client_left=lambda: True)
    assert caught.value.status == 499
    engine.gate.set()
    check(futures)
    assert engine.batches == [1, 1]


def test_a_failed_pass_is_tried_alone(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    def fault(batch: Sequence[Prompts]) -> None:
        if any(len(prompts.prefix) == 2 for prompts in batch):
            raise RuntimeError("no luck with two")

    engine.fault = fault
    batcher = Batcher(engine, 0.0, 64)
    futures = fill(pool, batcher, engine, 3)
    engine.gate.set()
    with pytest.raises(RuntimeError, match="no luck"):
        futures[2].result(30)
    for length in (0, 1, 3):
        assert futures[length].result(30)["answers"]["q"]["noul"] == pytest.approx(expected(length))
    assert engine.batches == [1, 3, 1, 1, 1]
    assert batcher.alive()


def test_an_outcome_may_be_an_error(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    engine.outcome = lambda prompts: EngineError("not finite")  # type: ignore[method-assign]
    engine.gate.set()
    batcher = Batcher(engine)
    with pytest.raises(EngineError, match="not finite"):
        batcher.submit("x", NOUL)
    assert batcher.alive()


@pytest.mark.parametrize("death", [SystemExit, torch.AcceleratorError, KeyboardInterrupt])
def test_death_answers_what_waits(
    engine: GatedEngine, pool: ThreadPoolExecutor, death: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fault(batch: Sequence[Prompts]) -> None:
        raise death("the device is lost")

    died = threading.Event()
    engine.fault = fault
    batcher = Batcher(engine, on_death=died.set)
    futures = fill(pool, batcher, engine, 3)
    engine.gate.set()
    for future in futures:
        with pytest.raises(BlinkBusy):
            future.result(30)
    assert died.wait(30)
    assert not batcher.alive()
    assert batcher.queued() == 0
    with pytest.raises(BlinkBusy):
        batcher.submit("x", NOUL)
    assert "the decision worker died" in caplog.text


def test_closing_decides_what_waits_and_refuses_more(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(engine, 20.0, 16)
    futures = [submit(pool, batcher, 0)]
    wait_until(lambda: batcher.queued() == 1)
    closing = pool.submit(batcher.close)
    assert engine.entered.acquire(timeout=20)
    with pytest.raises(BlinkBusy):
        batcher.submit("x", NOUL)
    engine.gate.set()
    check(futures)
    assert closing.result(30)
    assert not batcher.alive()


def test_closing_gives_up_after_its_time(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(engine)
    futures = fill(pool, batcher, engine, 0)
    assert not batcher.close(0.05)
    engine.gate.set()
    check(futures)


def test_a_withdrawn_request_leaves_the_worker_waiting(engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
    batcher = Batcher(engine, 20.0, 2)
    request = wire.validate({"state": "gone", "questions": NOUL})
    with pytest.raises(BlinkError):
        batcher.decide(request, client_left=lambda: True)
    engine.gate.set()
    check([submit(pool, batcher, i) for i in range(2)])
    assert engine.batches == [2]


@pytest.mark.parametrize("settings", [(-1.0, 1, 1), (float("nan"), 1, 1), (0.0, 0, 1), (0.0, 1, 0)])
def test_settings_are_checked(engine: GatedEngine, settings: tuple[float, int, int]) -> None:
    window_s, max_requests, max_queued = settings
    with pytest.raises(ValueError, match="at least"):
        Batcher(engine, window_s, max_requests, max_queued=max_queued)
