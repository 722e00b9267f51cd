"""The reference engine against whole prompts through the library's own model."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

import wire
from answers import Scores, probabilities
from blink import BlinkError, EngineError, TorchEngine
from prompts import Prompts

STATE = {"message": "The parcel never came, I want my money back.", "days": 6, "tags": ["late", None]}
QUESTIONS: dict[str, Any] = {
    "team": {
        "type": "choice",
        "instructions": "Who should own this?",
        "criteria": {"billing": "Money", "shipping": "Parcels", "b": "third", "legal": None},
    },
    "refund": {"type": "noul", "instructions": "Does the writer want money back?"},
    "described": {"type": "noul", "criteria": {"true": "it is about a parcel", "false": {"else": 1}}},
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "annoyed", {"level": "furious"}]},
    "many": {"type": "choice", "criteria": {f"option-{i}": f"number {i}" for i in range(255)}},
    "one": {"type": "choice", "criteria": {"only": None}},
}


# --- the reference engine --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny_qwen35", "full", "windowed"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def full(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model of full attention, with the built-in model's tokenizer."""
    return random_attention_model(mini, tmp_path_factory.mktemp("full"), window=None)


@pytest.fixture(scope="module")
def windowed(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but its layers see 256 tokens."""
    return random_attention_model(mini, tmp_path_factory.mktemp("windowed"), window=256)


def random_attention_model(tokenizer_from: Path, to: Path, window: int | None) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    tokenizer.save_pretrained(to)
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        max_position_embeddings=8192,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    model: Any = MistralForCausalLM(config)
    model.save_pretrained(to)
    return to


@pytest.fixture(scope="module")
def engine(folder: Path) -> TorchEngine:
    return TorchEngine(folder, "cpu")


@pytest.fixture(scope="module")
def whole_prompts(folder: Path) -> Callable[[TorchEngine, Prompts], Scores]:
    """Label logits of every question from its whole prompt alone, through the library's own head."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def scores(engine: TorchEngine, prompts: Prompts) -> Scores:
        rows = []
        for tail, offered in zip(prompts.tails, prompts.counts, strict=True):
            logits = model(torch.tensor([prompts.prefix + tail]), logits_to_keep=1).logits[0, -1]
            rows.append(logits[engine.label_ids[:offered]].tolist())
        return rows

    return scores


def difference(one: Scores | Exception, other: Scores | Exception) -> float:
    assert not isinstance(one, Exception)
    assert not isinstance(other, Exception)
    pairs = [(probabilities(a), probabilities(b)) for a, b in zip(one, other, strict=True)]
    return max(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True))


def prepared(engine: TorchEngine, state: Any, questions: Any = QUESTIONS) -> Prompts:
    return engine.prepare(wire.validate({"state": state, "questions": questions}))


def test_scores_equal_whole_prompts(
    engine: TorchEngine, whole_prompts: Callable[[TorchEngine, Prompts], Scores]
) -> None:
    long = {name: QUESTIONS[name] for name in ("team", "refund", "anger")}
    batch = [
        prepared(engine, STATE),
        prepared(engine, "", {"refund": QUESTIONS["refund"]}),
        prepared(engine, ["word"] * 150, long),
        prepared(engine, "a longer text. " * 40, {"anger": QUESTIONS["anger"]}),
    ]
    together = engine.score(batch)
    for prompts, scores in zip(batch, together, strict=True):
        assert difference(scores, whole_prompts(engine, prompts)) < 1e-4
        assert difference(scores, engine.score([prompts])[0]) < 1e-4


def test_a_small_budget_changes_passes_not_answers(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prepared(engine, STATE)
    passes = engine.passes
    (scores,) = engine.score([prompts])
    taken = engine.passes - passes
    monkeypatch.setattr(engine._body, "token_budget", 1)
    passes = engine.passes
    (alone,) = engine.score([prompts])
    assert engine.passes - passes > taken
    assert difference(scores, alone) < 1e-4


def test_decide_speaks_the_wire(engine: TorchEngine) -> None:
    decision = engine.decide(STATE, QUESTIONS)
    assert list(decision["answers"]) == list(QUESTIONS)
    for name, question in QUESTIONS.items():
        assert decision["answers"][name]["type"] == question["type"]
    assert decision["answers"]["one"]["probabilities"] == {"only": 1.0}
    prompts = prepared(engine, STATE)
    assert decision["meta"]["input_tokens"] == prompts.input_tokens


def test_order_and_company_do_not_move_answers(engine: TorchEngine) -> None:
    answers = engine.decide(STATE, QUESTIONS)["answers"]
    reversed_order = engine.decide(STATE, dict(reversed(QUESTIONS.items())))["answers"]
    alone = engine.decide(STATE, {"x": QUESTIONS["refund"]})["answers"]["x"]
    assert reversed_order["refund"]["noul"] == pytest.approx(answers["refund"]["noul"], abs=1e-4)
    assert alone["noul"] == pytest.approx(answers["refund"]["noul"], abs=1e-4)


def test_invalid_requests_cost_no_pass(engine: TorchEngine) -> None:
    passes = engine.passes
    with pytest.raises(BlinkError) as caught:
        engine.decide(None, {"q": {"type": "choice", "criteria": {}}})
    assert [row["loc"][1] for row in caught.value.detail] == ["state", "questions"]
    with pytest.raises(BlinkError, match="maximum context length"):
        engine.decide("word " * (engine.context + 10), {"q": QUESTIONS["refund"]})
    assert engine.passes == passes


def test_too_long_names_the_question(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "context", len(prepared(engine, "", {"r": QUESTIONS["refund"]}).prefix) + 100)
    with pytest.raises(BlinkError) as caught:
        engine.decide("", {"fits": QUESTIONS["refund"], "long": QUESTIONS["many"]})
    assert caught.value.status == 422
    assert caught.value.detail[0]["loc"] == ["body", "questions", "long"]


def test_not_finite_is_an_error_of_that_request_alone(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    good = prepared(engine, "fine", {"q": QUESTIONS["refund"]})
    bad = prepared(engine, "bad", {"q": QUESTIONS["team"]})
    step = engine._body.step

    def poisoned(jobs: Any) -> Any:
        return [(job, hidden * math.nan if job.prompts == bad else hidden) for job, hidden in step(jobs)]

    (expected,) = engine.score([good])
    monkeypatch.setattr(engine._body, "step", poisoned)
    scores, failed = engine.score([good, bad])
    assert difference(scores, expected) < 1e-4
    assert isinstance(failed, EngineError)
    with pytest.raises(EngineError, match="not finite"):
        engine.decide("bad", {"q": QUESTIONS["team"]})


def test_out_of_memory_halves_the_pass_then_fails_alone(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [prepared(engine, "word " * n, {"q": QUESTIONS["refund"]}) for n in (1, 5, 9, 400)]
    expected = engine.score(batch)
    forward = engine._body._forward
    room = 2 * (len(batch[2].prefix) + len(batch[2].tails[0]))

    def small(ids: list[list[int]], cache: Any = None) -> Any:
        if len(ids) * max(map(len, ids)) > room:
            raise torch.OutOfMemoryError
        return forward(ids, cache)

    monkeypatch.setattr(engine._body, "_forward", small)
    *fitting, too_long = engine.score(batch)
    assert isinstance(too_long, EngineError)
    for scores, right in zip(fitting, expected[:3], strict=True):
        assert difference(scores, right) < 1e-4


def test_out_of_memory_in_a_shared_prefix_fails_alone(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    two = {"a": QUESTIONS["refund"], "b": QUESTIONS["anger"]}
    batch = [prepared(engine, "word " * 400, two), prepared(engine, "fog", {"q": QUESTIONS["refund"]})]
    expected = engine.score(batch)
    forward = engine._body._forward

    def small(ids: list[list[int]], cache: Any = None) -> Any:
        if max(map(len, ids)) > 400:
            raise torch.OutOfMemoryError
        return forward(ids, cache)

    monkeypatch.setattr(engine._body, "_forward", small)
    failed, scores = engine.score(batch)
    assert isinstance(failed, EngineError)
    assert difference(scores, expected[1]) < 1e-4


def test_repeating_gives_the_same_bits(engine: TorchEngine) -> None:
    assert engine.warm_up()


def test_the_state_is_read_once_where_layers_allow(full: Path, tiny_qwen35: Path) -> None:
    questions = dict.fromkeys("abcd", QUESTIONS["refund"])
    for path, passes in ((full, 2), (tiny_qwen35, 1)):
        engine = TorchEngine(path, "cpu")
        engine.score([prepared(engine, "fog", questions)])
        assert engine.passes == passes


def test_the_folder_sets_the_temperatures(tiny_qwen35: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question type has its own; a temperature that is given, or set for the process, counts for all."""
    folder = shutil.copytree(tiny_qwen35, tmp_path / "model")
    (folder / "temperature.json").write_text('{"choice": 3.0, "noul": 0.5}')
    engine = TorchEngine(folder, "cpu")
    (scores,) = engine.score([prepared(engine, STATE, QUESTIONS)])
    assert not isinstance(scores, Exception)
    answers = engine.decide(STATE, QUESTIONS)["answers"]
    temperature = {"choice": 3.0, "noul": 0.5, "score": 1.0}
    for (name, question), logits in zip(QUESTIONS.items(), scores, strict=True):
        p = probabilities(logits, temperature[question["type"]])
        given = answers[name].get("probabilities", {"yes": answers[name].get("noul")})
        assert list(given.values()) == pytest.approx(p[: len(given)], abs=1e-6)
    assert {question["type"] for question in QUESTIONS.values()} == set(temperature)
    assert TorchEngine(folder, "cpu", 2.0).temperatures.noul == 2.0
    monkeypatch.setenv("BLINK_TEMPERATURE", "1.0")
    assert TorchEngine(folder, "cpu").temperatures.choice == 1.0


def test_settings(tiny_qwen35: Path, tmp_path: Path) -> None:
    engine = TorchEngine(tiny_qwen35, "cpu", temperature=2.0)
    sharp = TorchEngine(tiny_qwen35, "cpu")
    prompts = prepared(engine, STATE, {"q": QUESTIONS["refund"]})
    (scores,) = sharp.score([prompts])
    assert not isinstance(scores, Exception)
    warm = engine.decide(STATE, {"q": QUESTIONS["refund"]})["answers"]["q"]["noul"]
    assert warm == pytest.approx(probabilities(scores[0], 2.0)[0], abs=1e-6)
    assert engine.dtype == torch.float32
    assert engine.context == 131_072
    assert TorchEngine(tiny_qwen35, "cpu", dtype=torch.bfloat16).dtype == torch.bfloat16
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature"):
            TorchEngine(tiny_qwen35, "cpu", temperature)
    with pytest.raises((OSError, ValueError)):
        TorchEngine(tmp_path)
