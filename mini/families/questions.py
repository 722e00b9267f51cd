"""The three question types, worded in many ways, around what a family knows about a state."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Answer = tuple[dict[str, Any], list[float]]
"""A question as on the wire, and the probability of each of its answers in label order."""


class Option(NamedTuple):
    """One answer of a choice: its name, and what it means if the name does not say enough."""

    name: str
    meaning: str = ""


_PICK = (
    "",
    "",
    "",
    "",
    " Pick exactly one.",
    " Choose the best fit.",
    " Answer with one option.",
    " Only one is right.",
)
_WRAPS = (
    "{}",
    "{}",
    "{}",
    "{}",
    "{}",
    "Task: {}",
    "{} Judge by the evidence alone.",
    "Please decide: {}",
    "Question: {}",
)
_KEYS: tuple[Callable[[int], str], ...] = (
    lambda i: chr(ord("a") + i),
    lambda i: chr(ord("A") + i),
    lambda i: str(i + 1),
    lambda i: f"option_{i + 1}",
    lambda i: f"opt{i}",
)


def choice(draw: random.Random, asks: Sequence[str], options: Sequence[Option], gold: int | Sequence[float]) -> Answer:
    """A choice among options; `gold` is the right one's place, or the probability of each."""
    target = _one_hot(len(options), gold) if isinstance(gold, int) else list(gold)
    order = draw.sample(range(len(options)), len(options))
    shown = [options[i] for i in order]
    described = all(option.meaning for option in shown)
    style = draw.random()
    criteria: Any
    if described and style < 0.42:
        respell = _respelling(draw)
        criteria = {respell(option.name): option.meaning for option in shown}
    elif described and style < 0.54:
        key = draw.choice(_KEYS)
        criteria = {key(i): option.meaning for i, option in enumerate(shown)}
    elif described and style < 0.66:
        criteria = [option.meaning for option in shown]
    elif style < 0.76 and max(len(option.name) for option in shown) > 24:
        key = draw.choice(_KEYS)
        criteria = {key(i): option.name for i, option in enumerate(shown)}
    else:
        respell = _respelling(draw) if max(len(option.name) for option in shown) <= 24 else str
        names = [respell(option.name) for option in shown]
        criteria = names if draw.random() < 0.4 else dict.fromkeys(names)
    if len(criteria) < len(options):  # two options of one spelling
        criteria = {option.name: option.meaning or None for option in shown}
    question: dict[str, Any] = {"type": "choice"}
    text = draw.choice(asks) + draw.choice(_PICK)
    if draw.random() < 0.03:
        question["instructions"] = {"task": text, "options": len(options)}
    elif not (described and draw.random() < 0.03):
        question["instructions"] = instructed(draw, text)
    question["criteria"] = criteria
    return question, [target[i] for i in order]


def yes_no(
    draw: random.Random, text: str, yes: bool | float, sides: tuple[str, str] | None = None, *, often: float = 0.2
) -> Answer:
    """A yes/no question; `yes` is the probability of yes, `sides` what a yes and a no mean."""
    question: dict[str, Any] = {"type": "noul", "instructions": instructed(draw, text)}
    if sides and draw.random() < often:
        question["criteria"] = {"true": sides[0], "false": sides[1]}
        if draw.random() < 0.15:
            question["instructions"] = draw.choice(("Which side holds?", "Decide yes or no.", "Judge the evidence."))
    return question, [float(yes), 1.0 - float(yes)]


def score(draw: random.Random, asks: Sequence[str], levels: Sequence[str], target: Sequence[float]) -> Answer:
    """A level on a scale from low to high."""
    text = instructed(draw, draw.choice(asks))
    if draw.random() < 0.15:
        text += f" {0} means {levels[0]}, {len(levels) - 1} means {levels[-1]}."
    return {"type": "score", "instructions": text, "criteria": list(levels)}, list(target)


def instructed(draw: random.Random, text: str) -> str:
    """The text of an instruction, sometimes with a little around it."""
    return draw.choice(_WRAPS).format(text) if "{" not in text and "}" not in text else text


def level(count: int, gold: int, spread: float = 0.12) -> list[float]:
    """A target at one level, with a share of `spread` for its neighbours."""
    target = [0.0] * count
    near = [i for i in (gold - 1, gold + 1) if 0 <= i < count]
    for i in near:
        target[i] = spread / len(near)
    target[gold] = 1.0 - sum(target)
    return target


def _one_hot(count: int, gold: int) -> list[float]:
    return [float(i == gold) for i in range(count)]


def _respelling(draw: random.Random) -> Any:
    return draw.choice(
        (
            lambda name: name,
            lambda name: name,
            lambda name: name.replace("_", " "),
            lambda name: name.replace("_", " ").title(),
            lambda name: name.replace("_", " ").capitalize(),
            lambda name: name.replace(" ", "_").lower(),
            lambda name: name.replace(" ", "-").replace("_", "-").lower(),
            lambda name: name.replace(" ", "_").upper(),
        )
    )
