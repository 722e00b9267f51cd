"""The front of vLLM's asynchronous engine, over one whose time and faults the tests control."""

import asyncio
import math
import random
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from servers import wait_until

import wire
from answers import Decision, Temperatures
from blink import BlinkBusy, BlinkError, EngineError
from prompts import Prompts
from vllm_engine import VllmDecider

LABELS = [7, 3, 11, 5, *range(100, 120)]
NOUL = {"type": "noul", "instructions": "?"}


class Encoder:
    """A prompt as long as its state, and one id a question: its number."""

    label_ids = LABELS

    def encode(self, request: wire.DecisionRequest) -> Prompts:
        tails = [[number] * (1 + (name == "long")) for number, name in enumerate(request.questions)]
        counts = [2 if isinstance(question, wire.Noul) else 3 for question in request.questions.values()]
        return Prompts([0] * len(request.state), tails, counts)


def logits(ids: list[int]) -> list[float]:
    """What the fake model thinks of each label after a prompt."""
    return [math.sin(len(ids) * 7 + ids[-1] * 3 + i) for i in range(len(LABELS))]


def output(scores: dict[int, float], reason: str = "length") -> Any:
    top = {label: SimpleNamespace(logprob=score) for label, score in scores.items()}
    return SimpleNamespace(finished=True, outputs=[SimpleNamespace(finish_reason=reason, logprobs=[top])])


def named(values: list[float]) -> dict[int, float]:
    """The log-softmax of the labels' logits, by label."""
    total = math.log(math.fsum(map(math.exp, values)))
    return {label: value - total for label, value in zip(LABELS, values, strict=True)}


class FakeEngine:
    """Answers while its gate is open, with what `answer` makes of a prompt."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.errored = False
        self.vllm_config = None
        self.dying_generators_raise = True
        self.started: list[str] = []
        self.ended: list[str] = []
        self.aborted: list[str] = []
        self.most_at_once = 0
        self.shut_down = threading.Event()
        self.answer: Callable[[list[int]], Any] = lambda ids: output(named(logits(ids)))

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        assert sampling_params == ("sampling", LABELS)
        assert prompt["type"] == "token"
        self.started.append(request_id)
        self.most_at_once = max(self.most_at_once, len(self.started) - len(self.ended))
        try:
            while not self.gate.is_set():
                if self.errored and self.dying_generators_raise:
                    raise RuntimeError("the engine is dead")
                await asyncio.sleep(0.001)
            made = self.answer(prompt["prompt_token_ids"])
            if isinstance(made, Exception):
                raise made
            yield made
        finally:
            self.ended.append(request_id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def shutdown(self, timeout: float | None = None) -> None:
        self.shut_down.set()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def make(engine: FakeEngine) -> Iterator[Callable[..., VllmDecider]]:
    made: list[VllmDecider] = []

    def one(**settings: Any) -> VllmDecider:
        defaults: dict[str, Any] = {"max_model_len": 1000, "max_concurrency": 4}
        sampling = lambda labels: ("sampling", labels)  # noqa: E731
        encoder: Any = Encoder()
        made.append(VllmDecider(lambda: engine, encoder, sampling=sampling, **defaults | settings))
        return made[-1]

    yield one
    engine.gate.set()
    for decider in made:
        decider.close(5)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as made:
        yield made


def request(state: str = "x", questions: int = 1, **named: Any) -> wire.DecisionRequest:
    asked = named or {f"q{i}": NOUL for i in range(questions)}
    return wire.validate({"state": state, "questions": asked})


def expected(length: int, question: int = 0, temperature: float = 1.0) -> float:
    yes, no = (math.exp(value / temperature) for value in logits([0] * length + [question])[:2])
    return yes / (yes + no)


def fill(
    pool: ThreadPoolExecutor, decider: VllmDecider, engine: FakeEngine, requests: int, questions: int = 1
) -> list["Future[Decision]"]:
    """Requests of growing length that wait inside vLLM."""
    before = len(engine.started)
    futures = [pool.submit(decider.decide, request("x" * (i + 1), questions)) for i in range(requests)]
    wait_until(lambda: len(engine.started) == before + requests * questions)
    return futures


def noul(decision: Decision, name: str = "q0") -> float:
    answer = decision.answers[name]
    assert isinstance(answer, wire.NoulAnswer)
    return answer.noul


def refused(future: "Future[Decision]", status: int) -> BlinkError:
    with pytest.raises(BlinkError) as caught:
        future.result(30)
    assert caught.value.status == status
    return caught.value


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_answers_are_over_the_offered_labels_alone(
    make: Callable[..., VllmDecider], engine: FakeEngine, temperature: float
) -> None:
    engine.gate.set()
    decider = make(temperatures=Temperatures(temperature, temperature, temperature))
    choice = {"type": "choice", "criteria": ["a", "b", "c"]}
    decision = decider.decide(request("four", first=NOUL, second=choice))
    assert noul(decision, "first") == pytest.approx(expected(4, 0, temperature))
    weights = [math.exp(value / temperature) for value in logits([0] * 4 + [1])[:3]]
    second = decision.answers["second"]
    assert isinstance(second, wire.ChoiceAnswer)
    assert list(second.probabilities.values()) == pytest.approx([weight / sum(weights) for weight in weights])
    assert decision.input_tokens == 10
    assert list(decision.seconds) == ["render", "forward", "answer"]
    assert engine.aborted == []


def test_warm_up_tells_whether_answers_repeat(make: Callable[..., VllmDecider], engine: FakeEngine) -> None:
    engine.gate.set()
    decider = make()
    assert decider.warm_up()
    assert len(engine.started) == 6
    engine.answer = lambda ids: output(named([random.random() for _ in LABELS]))
    assert not decider.warm_up()


GOOD = named([0.0] * len(LABELS))
BAD_OUTPUTS = {
    "a label missing": output({label: score for label, score in GOOD.items() if label != 3}),
    "an infinite label": output(GOOD | {3: -math.inf}),
    "a label that is no number": output(GOOD | {3: math.nan}),
    "other ids have a part": output({label: score - 0.1 for label, score in GOOD.items()}),
    "no log-probabilities": SimpleNamespace(
        finished=True, outputs=[SimpleNamespace(finish_reason="length", logprobs=None)]
    ),
    "no outputs": SimpleNamespace(finished=True, outputs=[]),
}


@pytest.mark.parametrize("bad", BAD_OUTPUTS.values(), ids=BAD_OUTPUTS)
def test_bad_scores_are_never_an_answer(make: Callable[..., VllmDecider], engine: FakeEngine, bad: Any) -> None:
    engine.gate.set()
    decider = make()
    good = engine.answer
    engine.answer = lambda ids: bad
    with pytest.raises(EngineError):
        decider.decide(request())
    engine.answer = good
    assert noul(decider.decide(request())) == pytest.approx(expected(1))
    assert decider.queued() == 0


def test_what_vllm_gives_up_is_busy(make: Callable[..., VllmDecider], engine: FakeEngine) -> None:
    engine.gate.set()
    engine.answer = lambda ids: output({}, "abort")
    with pytest.raises(BlinkBusy):
        make().decide(request())


# --- limits ----------------------------------------------------------------------------------------------------------


def test_too_long_is_found_before_anything_is_sent(make: Callable[..., VllmDecider], engine: FakeEngine) -> None:
    engine.gate.set()
    decider = make(max_model_len=10)
    assert decider.context == 9  # the tenth position is the label's
    with pytest.raises(BlinkError, match="maximum context length of 9 tokens") as caught:
        decider.decide(request("x" * 8, short=NOUL, long=NOUL))
    assert caught.value.status == 422
    assert [row["loc"] for row in caught.value.detail] == [["body", "questions", "long"]]  # type: ignore[index]
    assert engine.started == []
    decider.decide(request("x" * 8, short=NOUL))
    assert decider.queued() == 0


def test_one_request_too_many_is_busy(
    make: Callable[..., VllmDecider], engine: FakeEngine, pool: ThreadPoolExecutor
) -> None:
    decider = make(max_concurrency=3)
    futures = fill(pool, decider, engine, 3, questions=2)
    assert decider.queued() == 3
    with pytest.raises(BlinkBusy) as caught:
        decider.decide(request())
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})
    engine.gate.set()
    for i, future in enumerate(futures):
        assert noul(future.result(30), "q1") == pytest.approx(expected(i + 1, 1))
    wait_until(lambda: decider.queued() == 0)
    decider.decide(request())


def test_places_come_back_however_a_request_ends(make: Callable[..., VllmDecider], engine: FakeEngine) -> None:
    decider = make(max_concurrency=1, max_model_len=10)
    for left in range(30):  # some leave before the loop has even begun with them
        with pytest.raises(BlinkError) as caught:
            decider.decide(request(), client_left=lambda: True, timeout_s=0 if left % 2 else 30)
        assert caught.value.status == (504 if left % 2 else 499)
        wait_until(lambda: decider.queued() == 0)
    engine.gate.set()
    engine.answer = lambda ids: ValueError("no luck")
    with pytest.raises(EngineError):
        decider.decide(request())
    with pytest.raises(BlinkError, match="maximum context"):
        decider.decide(request("x" * 20))
    wait_until(lambda: decider.queued() == 0)
    assert sorted(engine.started) == sorted(engine.ended)


def test_few_questions_of_a_request_are_in_vllm_at_a_time(make: Callable[..., VllmDecider], engine: FakeEngine) -> None:
    engine.gate.set()
    decision = make(max_questions=3).decide(request("abc", 20))
    assert [noul(decision, f"q{i}") for i in range(20)] == pytest.approx([expected(3, i) for i in range(20)])
    assert engine.most_at_once <= 3


# --- what ends early -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "why"), [(504, {"timeout_s": 0.2}), (499, {"client_left": None})])
def test_what_nobody_waits_for_is_aborted(
    make: Callable[..., VllmDecider],
    engine: FakeEngine,
    pool: ThreadPoolExecutor,
    status: int,
    why: dict[str, Any],
) -> None:
    decider = make()
    other = fill(pool, decider, engine, 1)[0]
    left = threading.Event()
    if "client_left" in why:
        why = {"client_left": left.is_set}
    future = pool.submit(decider.decide, request("xx", 3), **why)
    wait_until(lambda: len(engine.started) == 4 or future.done())
    left.set()
    refused(future, status)
    wait_until(lambda: len(engine.ended) == len(engine.started) - 1)
    assert set(engine.aborted) == set(engine.ended)
    engine.gate.set()
    assert noul(other.result(30)) == pytest.approx(expected(1))


def test_a_failed_question_ends_its_own_request_alone(
    make: Callable[..., VllmDecider], engine: FakeEngine, pool: ThreadPoolExecutor
) -> None:
    good = engine.answer
    stuck = threading.Event()

    def answer(ids: list[int]) -> Any:
        return ValueError("secret state") if ids == [0, 0, 1] else good(ids)

    async def generate(prompt: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        if len(prompt["prompt_token_ids"]) == 3 and prompt["prompt_token_ids"][-1] != 1:
            engine.started.append(request_id)
            stuck.set()
            try:
                await asyncio.sleep(60)
            finally:
                engine.ended.append(request_id)
        async for made in FakeEngine.generate(engine, prompt, sampling_params, request_id):
            yield made

    engine.answer = answer
    engine.generate = generate  # type: ignore[method-assign]
    decider = make()
    other = fill(pool, decider, engine, 1, questions=2)[0]
    failing = pool.submit(decider.decide, request("xx", 4))
    assert stuck.wait(20)
    wait_until(lambda: len(engine.started) == 6)
    engine.gate.set()
    error = refused(failing, 500)
    assert isinstance(error, EngineError)
    assert "secret" not in error.message
    assert noul(other.result(30)) == pytest.approx(expected(1))
    wait_until(lambda: decider.queued() == 0)
    assert len(engine.ended) == 6
    assert len(engine.aborted) == 4
    assert decider.alive()


# --- death and closing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generators_raise", [True, False])
def test_a_dead_engine_answers_what_waits(
    make: Callable[..., VllmDecider],
    engine: FakeEngine,
    pool: ThreadPoolExecutor,
    generators_raise: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    deaths: list[bool] = []
    decider = make(on_death=lambda: deaths.append(True))
    futures = fill(pool, decider, engine, 3, questions=2)
    engine.dying_generators_raise = generators_raise
    engine.errored = True
    for future in futures:
        assert isinstance(refused(future, 503), BlinkBusy)
    wait_until(lambda: bool(deaths))
    assert not decider.alive()
    with pytest.raises(BlinkBusy):
        decider.decide(request())
    assert decider.close(5)
    assert engine.shut_down.is_set()
    assert deaths == [True]
    assert decider.queued() == 0
    assert "engine died" in caplog.text


def test_an_engine_that_dies_idle_is_noticed(make: Callable[..., VllmDecider], engine: FakeEngine) -> None:
    died = threading.Event()
    decider = make(on_death=died.set)
    engine.errored = True
    assert died.wait(20)
    assert not decider.alive()


def test_a_loop_that_breaks_loses_nobody(
    make: Callable[..., VllmDecider], engine: FakeEngine, pool: ThreadPoolExecutor
) -> None:
    died = threading.Event()
    decider = make(on_death=died.set)
    futures = fill(pool, decider, engine, 2)

    def broken(ids: list[int]) -> Any:
        raise SystemExit(3)  # ends the loop, whatever runs in it

    engine.answer = broken
    engine.gate.set()
    for future in futures:
        refused(future, 503)
    assert died.wait(20)
    wait_until(lambda: not decider.alive())
    with pytest.raises(BlinkBusy):
        decider.decide(request())


def test_requests_that_meet_the_death_all_get_an_answer(
    make: Callable[..., VllmDecider], engine: FakeEngine, pool: ThreadPoolExecutor
) -> None:
    engine.gate.set()
    decider = make(max_concurrency=64)

    def client() -> None:
        while True:
            decider.decide(request(), timeout_s=60)

    futures = [pool.submit(client) for _ in range(8)]
    wait_until(lambda: len(engine.started) > 200)
    engine.errored = True
    for future in futures:
        assert isinstance(future.exception(60), BlinkBusy)
    wait_until(lambda: decider.queued() == 0)


def test_a_failed_start_is_told(engine: FakeEngine) -> None:
    def fail() -> Any:
        raise ValueError("no such quantization")

    encoder: Any = Encoder()
    before = threading.active_count()
    with pytest.raises(ValueError, match="no such quantization"):
        VllmDecider(fail, encoder, max_model_len=10, max_concurrency=1, sampling=list)
    wait_until(lambda: threading.active_count() <= before)


def test_closing_answers_what_is_under_way(
    make: Callable[..., VllmDecider], engine: FakeEngine, pool: ThreadPoolExecutor
) -> None:
    decider = make()
    futures = fill(pool, decider, engine, 2)
    closing = pool.submit(decider.close)
    wait_until(lambda: decider._closing)
    with pytest.raises(BlinkBusy):
        decider.decide(request())
    assert not engine.shut_down.is_set()
    engine.gate.set()
    for i, future in enumerate(futures):
        assert noul(future.result(30)) == pytest.approx(expected(i + 1))
    assert closing.result(30)
    assert engine.shut_down.is_set()
    assert not decider.alive()


def test_closing_gives_up_after_its_time(
    make: Callable[..., VllmDecider], engine: FakeEngine, pool: ThreadPoolExecutor
) -> None:
    decider = make()
    futures = fill(pool, decider, engine, 2)
    assert not decider.close(0.05)
    for future in futures:
        refused(future, 503)
    assert engine.shut_down.is_set()
    assert len(engine.aborted) == 2


def test_many_requests_get_their_own_answers(
    make: Callable[..., VllmDecider], engine: FakeEngine, pool: ThreadPoolExecutor
) -> None:
    engine.gate.set()
    good = engine.answer
    engine.answer = lambda ids: ValueError("no luck") if len(ids) % 5 == 0 else good(ids)
    decider = make(max_concurrency=300)  # one that timed out keeps its place until it is cancelled

    def one(length: int) -> None:
        if length % 7 == 0:
            with pytest.raises(BlinkError):
                decider.decide(request("x" * length, 3), timeout_s=0)
        elif (length + 1) % 5 == 0:
            with pytest.raises(EngineError):
                decider.decide(request("x" * length, 3))
        else:
            decision = decider.decide(request("x" * length, 3))
            assert [noul(decision, f"q{i}") for i in range(3)] == pytest.approx([expected(length, i) for i in range(3)])

    list(pool.map(one, [n % 40 + 1 for n in range(300)]))
    wait_until(lambda: decider.queued() == 0)
