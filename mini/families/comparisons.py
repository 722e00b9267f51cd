"""Families about comparing values: which is more, which is newer, which has the right form."""

import random
from typing import Any

from mini.families import grammar
from mini.families.questions import Answer, Option, choice, level, score, yes_no
from mini.families.timing import DATES, day_drawn
from mini.items import Kind

_COUNTS = ("none", "one", "two", "three", "four", "five")


def which_is_more(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Several people or things with one number each."""
    slot, unit, most, least = draw.choice(
        (
            ("name", "years old", "oldest", "youngest"),
            ("product", "euros", "dearest", "cheapest"),
            ("city", "degrees", "warmest", "coldest"),
            ("company", "employees", "largest", "smallest"),
            ("animal", "kilos", "heaviest", "lightest"),
            ("name", "points", "best", "worst"),
        )
    )
    count = draw.randint(2, 6)
    names, values = grammar.pick(draw, slot, count), draw.sample(range(3, 95), count)
    table = dict(zip(names, values, strict=True))
    state = draw.choice(
        (table, "; ".join(f"{n}: {v} {unit}" for n, v in table.items()), {"unit": unit, "values": table})
    )
    top = draw.random() < 0.5
    best = (max if top else min)(names, key=table.__getitem__)
    word = most if top else least
    if kind == "choice":
        return state, choice(
            draw,
            (f"Who or what is the {word}?", f"Which is the {word} ({unit})?"),
            [Option(n) for n in names],
            names.index(best),
        )
    if kind == "noul":
        first, second = draw.sample(names, 2)
        if draw.random() < 0.5:
            return state, yes_no(
                draw, f"Does {first} have more {unit.split()[0]} than {second}?", table[first] > table[second]
            )
        yes = draw.random() < 0.5
        asked = best if yes else draw.choice([n for n in names if n != best])
        return state, yes_no(draw, f"Is {asked} the {word}?", yes)
    bound = draw.randint(10, 80)
    hits = sum(v > bound for v in values)
    levels = [str(i) for i in range(count + 1)]
    return state, score(
        draw, (f"How many of them have more than {bound} {unit}?",), levels, level(count + 1, hits, 0.1)
    )


def newer_version(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Version numbers: is the installed one new enough?"""
    need = (draw.randint(1, 9), draw.randint(0, 20))
    shift = draw.choice((-1, 1))
    have = (
        (max(0, need[0] + shift), draw.randint(0, 20))
        if draw.random() < 0.6
        else (need[0], max(0, need[1] + shift * draw.randint(0, 5)))
    )
    enough = have >= need
    tool = draw.choice(("driver", "library", "browser", "runtime", "plug-in", "app"))
    a, b = f"{have[0]}.{have[1]}", f"{need[0]}.{need[1]}"
    state = draw.choice(
        (f"The {tool} must have version {b} or newer. Installed: {a}.", {"needed": b, "installed": a, "what": tool})
    )
    if kind == "noul":
        if draw.random() < 0.4:
            return state, yes_no(draw, f"Must the {tool} be updated?", not enough)
        return state, yes_no(draw, f"Is the {tool} new enough?", enough)
    if kind == "choice":
        options = [Option("keep", "the version is new enough"), Option("update", "the version is too old")]
        return state, choice(draw, (f"What should be done with the {tool}?",), options, int(not enough))
    place = 0 if have[0] < need[0] else 1 if have < need else 2 if have[0] == need[0] else 3
    levels = ["a main version behind", "a little behind", "same main version, new enough", "a main version ahead"]
    return state, score(draw, ("How does the installed version compare?",), levels, level(4, place, 0.08))


def format_check(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Strings that do or do not have a stated form."""
    letters = "ABCDEFGHKLMNPRSTUVWXYZ"
    good = {
        "a mail address": lambda: grammar.fill(draw, "{name}@[mail|post|office].[test|example]").lower(),
        "a time of day": lambda: f"{draw.randint(0, 23):02d}:{draw.randint(0, 59):02d}",
        "a date": lambda: day_drawn(draw).strftime(draw.choice(DATES)),
        "an amount of money": lambda: grammar.fill(draw, "{money}"),
        "a phone number": lambda: f"+{draw.randint(10, 99)} {draw.randint(100, 999)} {draw.randint(1000, 9999)}",
        "a web address": lambda: grammar.fill(draw, "https://{name}.example/[home|shop]").lower(),
        "a person's name": lambda: grammar.fill(draw, "{name} {surname}"),
        "a number plate": lambda: (
            f"{draw.choice(letters)}{draw.choice(letters)}-{draw.randint(100, 9999)} {draw.choice(letters)}"
        ),
        "a percentage": lambda: f"{draw.randint(1, 100)} %",
    }
    names = draw.sample(sorted(good), draw.randint(3, 6))
    right = names[0]
    value = good[right]()
    state = draw.choice((value, {"value": value}, f"Value: {value}"))
    if kind == "choice":
        return state, choice(
            draw, ("What kind of value is this?", "What does the string stand for?"), [Option(n) for n in names], 0
        )
    if kind == "noul":
        yes = draw.random() < 0.5
        return state, yes_no(draw, f"Is this {right if yes else names[1]}?", yes)
    total = draw.randint(2, 4)
    hits = draw.randint(0, total)
    values = [good[right]() for _ in range(hits)] + [good[draw.choice(names[1:])]() for _ in range(total - hits)]
    draw.shuffle(values)
    levels = list(_COUNTS[: total + 1])
    return {"values": values}, score(
        draw, (f"How many of the values are {right}?",), levels, level(total + 1, hits, 0.06)
    )
