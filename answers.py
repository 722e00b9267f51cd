"""Label logits become answers: a softmax over the offered labels, and the formulas of the wire."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wire
from prompts import Prompts, option_keys

Scores = list[list[float]]
"""Label logits of one request: for each question those of its offered labels, FP32 values."""


@dataclass(frozen=True, slots=True)
class Temperatures:
    """What the label logits of each question type are divided by before the softmax.

    Raises:
        ValueError: one of them is not a positive number.
    """

    choice: float = 1.0
    noul: float = 1.0
    score: float = 1.0

    def __post_init__(self) -> None:
        for value in (self.choice, self.noul, self.score):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"temperature should be a positive number, not {value!r}")

    @classmethod
    def of_folder(cls, root: Path, override: float | None = None) -> "Temperatures":
        """`override` for all types, else those of a folder's `temperature.json`; a folder without one has 1.0 for all.

        Raises:
            ValueError: the file does not hold a positive number by question type.
        """
        if override is not None:
            return cls(override, override, override)
        path = root / "temperature.json"
        if not path.exists():
            return cls()
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be used: {error}") from None

    def of(self, question: wire.Question) -> float:
        return float(getattr(self, question.type))


def probabilities(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Softmax over the offered labels only."""
    top = max(logits)
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def choice_confidence(p: Sequence[float]) -> float:
    """How far the largest probability stands above a guess: (n max p - 1) / (n - 1), and 1 for a single option."""
    n = len(p)
    return 1.0 if n == 1 else min(1.0, max(0.0, (n * max(p) - 1) / (n - 1)))


def score_confidence(p: Sequence[float]) -> float:
    """One less the mean distance from the likeliest level, in units of a uniform guess about the middle.

    1 - sum(p_i |i - k|) / D with k the first likeliest level and D = floor(n^2 / 4) / n, as the official adapter does.
    """
    n = len(p)
    if n == 1:
        return 1.0
    top = p.index(max(p))
    distance = math.fsum(weight * abs(level - top) for level, weight in enumerate(p))
    return min(1.0, max(0.0, 1 - distance / (n * n // 4 / n)))


def build_answer(question: wire.Question, p: Sequence[float]) -> wire.Answer:
    """The typed answer from the probabilities of the offered labels, in label order."""
    named = dict(zip(option_keys(question), p, strict=True))
    match question:
        case wire.Noul():
            return wire.NoulAnswer(noul=p[0])
        case wire.Choice():
            best = max(named, key=named.__getitem__)  # the first of equals
            return wire.ChoiceAnswer(choice=best, confidence=choice_confidence(p), probabilities=named)
        case wire.Score():
            return wire.ScoreAnswer(
                score=math.fsum(level * weight for level, weight in enumerate(p)),
                confidence=score_confidence(p),
                legend={str(level): text for level, text in enumerate(question.criteria)},
                probabilities=named,
            )


@dataclass(slots=True)
class Decision:
    """The answers to one request by question id, in request order, with what they took."""

    answers: dict[str, wire.Answer]
    input_tokens: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each stage."""

    def as_dict(self) -> dict[str, Any]:
        answers = {name: answer.model_dump() for name, answer in self.answers.items()}
        return {"answers": answers, "meta": {"input_tokens": self.input_tokens, "seconds": self.seconds}}


def build_decision(
    request: wire.DecisionRequest, prompts: Prompts, scores: Scores, temperatures: Temperatures
) -> Decision:
    answers = {
        name: build_answer(question, probabilities(logits, temperatures.of(question)))
        for (name, question), logits in zip(request.questions.items(), scores, strict=True)
    }
    return Decision(answers, prompts.input_tokens)
