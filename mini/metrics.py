"""What the answers to items are worth: accuracy, calibration, and the temperatures that make them honest."""

import math
from collections.abc import Sequence

from answers import probabilities
from mini.items import KINDS, Item

BINS = 15


def fitted_temperatures(items: Sequence[Item], logits: Sequence[Sequence[float]]) -> dict[str, float]:
    """For each question type the temperature with the least cross-entropy on these items, to 1 %."""
    grid = [math.exp(i / 100) for i in range(-160, 161)]
    found: dict[str, float] = {}
    for kind in KINDS:
        rows = [(item.target, row) for item, row in zip(items, logits, strict=True) if item.kind == kind]
        errors = [_cross_entropy(rows, temperature) for temperature in grid]
        found[kind] = round(grid[errors.index(min(errors))], 3) if rows else 1.0
    return found


def _cross_entropy(rows: Sequence[tuple[Sequence[float], Sequence[float]]], temperature: float) -> float:
    return math.fsum(
        -share * math.log(max(p, 1e-12))
        for target, logits in rows
        for share, p in zip(target, probabilities(logits, temperature), strict=True)
        if share
    )


def calibration_error(confidences: Sequence[float], right: Sequence[bool]) -> float:
    """Expected calibration error: the mean gap of confidence and accuracy over equal bins, weighted by their items."""
    error = 0.0
    for b in range(BINS):
        inside = [i for i, c in enumerate(confidences) if b <= min(c * BINS, BINS - 1e-9) < b + 1]
        if inside:
            gap = math.fsum(confidences[i] - right[i] for i in inside)
            error += abs(gap)
    return error / max(1, len(confidences))


def brier(p: Sequence[float], target: Sequence[float]) -> float:
    """Squared distance of the probabilities from the target, summed over the options."""
    return math.fsum((a - b) ** 2 for a, b in zip(p, target, strict=True))


def summary(items: Sequence[Item], answered: Sequence[Sequence[float]]) -> dict[str, float]:
    """Figures of items of one question type, from the probabilities of their options.

    `accuracy` counts the likeliest option; yes/no has `balanced`, the mean accuracy of the yes and of the no items, and
    `yes`, how often yes was answered; score has `within_one` and `mae`, the mean distance of the score in levels.
    """
    chosen = [max(range(len(p)), key=p.__getitem__) for p in answered]
    right = [c == item.gold for c, item in zip(chosen, items, strict=True)]
    n = len(items)
    found = {
        "n": n,
        "accuracy": sum(right) / n,
        "ece": calibration_error([max(p) for p in answered], right),
        "brier": math.fsum(brier(p, item.target) for p, item in zip(answered, items, strict=True)) / n,
    }
    if items[0].kind == "noul":
        sides = [[r for r, item in zip(right, items, strict=True) if item.gold == side] for side in (0, 1)]
        found["balanced"] = sum(sum(side) / len(side) for side in sides if side) / sum(map(bool, sides))
        found["yes"] = sum(c == 0 for c in chosen) / n
    if items[0].kind == "score":
        found["within_one"] = sum(abs(c - item.gold) <= 1 for c, item in zip(chosen, items, strict=True)) / n
        means = [math.fsum(i * x for i, x in enumerate(p)) for p in answered]
        wanted = [math.fsum(i * x for i, x in enumerate(item.target)) for item in items]
        found["mae"] = math.fsum(abs(a - b) for a, b in zip(means, wanted, strict=True)) / n
    return {name: value if name == "n" else round(value, 4) for name, value in found.items()}
