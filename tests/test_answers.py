"""Answers against the formulas and test vectors of the wire."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wire
from answers import Temperatures, build_answer, choice_confidence, probabilities, score_confidence


@pytest.mark.parametrize(
    ("p", "confidence"),
    [
        ([0.1, 0.37, 0.24, 0.29], 0.16),
        ([0.08, 0.92, 0.0], 0.88),
        ([0.88, 0.12, 0.0], 0.82),
        ([1.0], 1.0),
        ([0.25] * 4, 0),
    ],
)
def test_choice_confidence(p: list[float], confidence: float) -> None:
    assert choice_confidence(p) == pytest.approx(confidence, abs=1e-9)


@pytest.mark.parametrize(
    ("p", "confidence"),
    [
        ([0, 0.95, 0.05], 0.925),
        ([0, 0.7, 0.3], 0.55),
        ([0.05, 0, 0, 0, 0.95], 0.8333333),
        ([0.004, 0.04, 0.745, 0.17, 0.041], 0.75),
        ([1.0], 1.0),
        ([0.5, 0.5], 0.0),
        ([0.5, 0.0, 0.0, 0.0, 0.5], 0.0),
    ],
)
def test_score_confidence(p: list[float], confidence: float) -> None:
    assert score_confidence(p) == pytest.approx(confidence, abs=2e-3)


@given(st.lists(st.floats(-80, 80), min_size=1, max_size=255), st.floats(0.05, 20))
def test_answers_hold_what_strict_clients_ask(logits: list[float], temperature: float) -> None:
    p = probabilities(logits, temperature)
    assert abs(math.fsum(p) - 1) < 1e-9
    keys = {f"k{i}": None for i in range(len(p))}
    choice = _answer({"type": "choice", "criteria": keys}, p)
    assert list(choice["probabilities"]) == list(keys)
    assert choice["choice"] == f"k{p.index(max(p))}"
    assert 0 <= choice["confidence"] <= 1
    levels = p[:10]
    levels = [x / math.fsum(levels) for x in levels] if math.fsum(levels) > 0 else [1.0]
    score = _answer({"type": "score", "criteria": ["l"] * len(levels)}, levels)
    assert 0 <= score["confidence"] <= 1
    assert 0 <= score["score"] <= len(levels) - 1 + 1e-9


def _answer(question: Any, p: list[float]) -> dict[str, Any]:
    checked = wire.validate({"state": "", "questions": {"q": question}}).questions["q"]
    return build_answer(checked, p).model_dump()


def test_answers_as_they_go_over_the_wire() -> None:
    assert _answer({"type": "noul", "instructions": "?"}, [0.25, 0.75]) == {"type": "noul", "noul": 0.25}
    assert _answer({"type": "choice", "criteria": ["b", "a"]}, [0.5, 0.5]) == {
        "type": "choice",
        "choice": "b",
        "confidence": 0.0,
        "probabilities": {"b": 0.5, "a": 0.5},
    }
    assert _answer({"type": "score", "criteria": [{"x": 1}, "b"]}, [0.25, 0.75]) == {
        "type": "score",
        "score": 0.75,
        "confidence": 0.5,
        "legend": {"0": {"x": 1}, "1": "b"},
        "probabilities": {"0": 0.25, "1": 0.75},
    }
    single = _answer({"type": "score", "criteria": ["only"]}, [1.0])
    assert (single["score"], single["confidence"], single["probabilities"]) == (0.0, 1.0, {"0": 1.0})


def test_temperature_divides_the_logits() -> None:
    assert probabilities([0.0, math.log(9)], 2.0) == pytest.approx([0.25, 0.75])
    assert probabilities([1000.0, 0.0]) == [1.0, 0.0]


def test_temperatures_of_a_folder(tmp_path: Path) -> None:
    assert Temperatures.of_folder(tmp_path) == Temperatures(1.0, 1.0, 1.0)
    (tmp_path / "temperature.json").write_text(json.dumps({"choice": 1.5, "score": 0.7}))
    found = Temperatures.of_folder(tmp_path)
    assert found == Temperatures(1.5, 1.0, 0.7)
    asked = {"q": {"type": "score", "instructions": "?", "criteria": ["low", "high"]}}
    assert found.of(wire.validate({"state": "", "questions": asked}).questions["q"]) == 0.7


@pytest.mark.parametrize(
    "text", ["nonsense", "[1]", '{"choice": 0}', '{"noul": NaN}', '{"noul": "warm"}', '{"box": 1}']
)
def test_temperatures_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "temperature.json").write_text(text)
    with pytest.raises(ValueError, match="temperature"):
        Temperatures.of_folder(tmp_path)
