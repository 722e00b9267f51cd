"""Sixty mixed questions in requests of one to eight, drawn once with a fixed seed."""

import random
from typing import Any

_TEXT = """
parcel depot courier boots friday refund late early broken invoice north south gate harbour boat ferry bill account
card charge payment window door kitchen garden winter summer report error screen battery cable router train ticket
seat platform hotel room key breakfast doctor letter school class exam teacher result 배 備考 naïve
"""
WORDS = _TEXT.split()


def requests(seed: int = 7, count: int = 60) -> list[dict[str, Any]]:
    """Bodies for `/v1/systemone` with `count` questions in all, of every type and of 1 to 255 options."""
    rng = random.Random(seed)
    made: list[dict[str, Any]] = []
    options = [255, 1, 2, 26, 27, 100]
    number = 0
    while number < count:
        questions: dict[str, Any] = {}
        for _ in range(min(count - number, rng.choice((1, 1, 2, 4, 8)))):
            questions[f"q{number}"] = _question(rng, number, options)
            number += 1
        text = _text(rng, rng.choice((3, 20, 80, 300)))
        state: Any = text if rng.random() < 0.5 else {"message": text, "tags": rng.sample(WORDS, 3), "days": number}
        made.append({"model": "jev-latest", "state": state, "questions": questions})
    return made


def _question(rng: random.Random, number: int, options: list[int]) -> dict[str, Any]:
    asked = f"Is it about the {rng.choice(WORDS)} or the {rng.choice(WORDS)}?"
    match number % 3:
        case 0:
            return {"type": "noul", "instructions": asked}
        case 1:
            many = options.pop(0) if options else rng.randint(2, 9)
            return {
                "type": "choice",
                "instructions": asked,
                "criteria": {f"kind {i}": _text(rng, 2) for i in range(many)},
            }
        case _:
            return {
                "type": "score",
                "instructions": asked,
                "criteria": [_text(rng, 3) for _ in range(rng.randint(2, 10))],
            }


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))
