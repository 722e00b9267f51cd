"""The packed pass behind the engine, on the CPU with the reference operators."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_blink import QUESTIONS, STATE, difference, prepared

import qwen35
from batcher import Batcher
from blink import EngineError, FastBody, TorchEngine


@pytest.fixture(scope="module")
def reference(tiny_qwen35: Path) -> TorchEngine:
    return TorchEngine(tiny_qwen35, "cpu", fast=False)


@pytest.fixture(scope="module")
def packed(tiny_qwen35: Path) -> TorchEngine:
    """An engine that takes the CPU for fit; its self-check runs as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen35, "unsupported", lambda folder, device: None)
        return TorchEngine(tiny_qwen35, "cpu")


def test_both_bodies_say_who_they_are(reference: TorchEngine, packed: TorchEngine, tiny_qwen35: Path) -> None:
    assert (packed.name, packed.why_reference, packed.kernels) == ("qwen35", None, "reference")
    assert reference.name == "reference (switched off)"
    assert TorchEngine(tiny_qwen35, "cpu").name == "reference (no CUDA device)"


def test_both_bodies_give_the_same_scores(reference: TorchEngine, packed: TorchEngine) -> None:
    few = {name: QUESTIONS[name] for name in ("team", "refund", "one")}
    batch = [
        prepared(packed, STATE),
        prepared(packed, "", {"q": QUESTIONS["refund"]}),
        prepared(packed, "a longer text. " * 90, few),
    ]
    for ours, theirs in zip(packed.score(batch), reference.score(batch), strict=True):
        assert difference(ours, theirs) < 1e-4
    assert packed.warm_up()


def test_the_batcher_drives_slices(
    reference: TorchEngine, packed: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed._body, "token_budget", 512)
    monkeypatch.setattr(packed, "token_budget", 512)
    batcher = Batcher(packed, 0.0, 16)
    few = {"refund": QUESTIONS["refund"], "anger": QUESTIONS["anger"]}
    passes = packed.passes
    long = batcher.submit("word " * 1500, few)
    assert packed.passes - passes >= 3
    expected = reference.decide("word " * 1500, few)
    assert long["answers"]["refund"]["noul"] == pytest.approx(expected["answers"]["refund"]["noul"], abs=1e-4)
    assert batcher.close()


def test_a_pass_that_moves_answers_is_refused(tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = FastBody.step

    def wrong(self: FastBody, jobs: Sequence[qwen35.Job]) -> Any:
        return [(job, -hidden) for job, hidden in step(self, jobs)]  # type: ignore[operator]

    monkeypatch.setattr(qwen35, "unsupported", lambda folder, device: None)
    monkeypatch.setattr(FastBody, "step", wrong)
    engine = TorchEngine(tiny_qwen35, "cpu")
    assert engine.why_reference is not None
    assert "moves answers" in engine.why_reference
    assert engine.name.startswith("reference (")
    assert engine.decide(STATE, {"q": QUESTIONS["refund"]})["answers"]["q"]["type"] == "noul"


def test_out_of_memory_halves_the_pass_then_fails_alone(packed: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prepared(packed, "word " * 2000, {"q": QUESTIONS["refund"]})
    (expected,) = packed.score([prompts])
    engine = packed._body._engine
    step, budgets = engine.step, []

    def small(jobs: Sequence[qwen35.Job], budget: int) -> Any:
        budgets.append(budget)
        if budget > room:
            raise torch.OutOfMemoryError
        return step(jobs, budget)

    monkeypatch.setattr(engine, "step", small)
    room = 1000
    (scores,) = packed.score([prompts])
    assert difference(scores, expected) < 1e-4
    assert max(budgets) > room > min(budgets)
    room = 0
    (failed,) = packed.score([prompts])
    assert isinstance(failed, EngineError)
    room = 100_000
    (scores,) = packed.score([prompts])
    assert difference(scores, expected) < 1e-4
