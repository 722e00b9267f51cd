"""Families told by example sentences, read from the text files in `banks/`.

A topic has labels, each with names, meanings and sentences; a signal has sentences that show it and sentences that do
not; a scale has sentences for five grades. Each of them answers all three question types.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mini.families import envelopes, grammar
from mini.families.questions import Answer, Option, choice, level, score, yes_no
from mini.items import Item, Kind

_COUNTS = ("none", "one", "two", "three", "four", "five")
_OTHER = (
    Option("other", "none of the listed options fits"),
    Option("none_of_these", "anything that is not listed here"),
    Option("something_else", "something else than the options above or below"),
)


@dataclass(slots=True)
class _Label:
    names: list[str]
    meanings: list[str]
    says: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Topic:
    """Texts under several labels."""

    name: str
    noun: str
    asks: list[str] = field(default_factory=list)
    confirms: list[str] = field(default_factory=list)
    labels: list[_Label] = field(default_factory=list)

    def make(self, draw: random.Random, kind: Kind) -> Item:
        state, answer = {"choice": self._choice, "noul": self._noul, "score": self._score}[kind](draw)
        return Item(self.name, state, *answer)

    def _option(self, draw: random.Random, label: _Label) -> Option:
        return Option(draw.choice(label.names), draw.choice(label.meanings))

    def _choice(self, draw: random.Random) -> tuple[Any, Answer]:
        count = min(len(self.labels), draw.choice((2, 3, 3, 4, 4, 5, 6, 7, 8, 10, 12)))
        labels = draw.sample(self.labels, count)
        if draw.random() < 0.1:  # the other way round: which text belongs to the label?
            wanted = self._option(draw, labels[0])
            texts = [Option(grammar.say(draw, label.says)) for label in labels[:6]]
            asks = [f"Which {self.noun} is about {wanted.meaning}?", f"Which {self.noun} belongs to {wanted.name}?"]
            state = draw.choice(("", {"label": wanted.name, "meaning": wanted.meaning}, wanted.meaning))
            if len({text.name for text in texts}) == len(texts):
                return state, choice(draw, asks, texts, 0)
        state = envelopes.wrap(draw, grammar.say(draw, labels[0].says), self.noun)
        options = [self._option(draw, label) for label in labels]
        roll = draw.random()
        if roll < 0.04 and count > 2:
            options[0] = draw.choice(_OTHER)  # the text's own label is not offered
        elif roll < 0.10:
            options.append(draw.choice(_OTHER))
        return state, choice(draw, self.asks, options, 0)

    def _noul(self, draw: random.Random) -> tuple[Any, Answer]:
        true, false = draw.sample(self.labels, 2)
        state = envelopes.wrap(draw, grammar.say(draw, true.says), self.noun)
        yes = draw.random() < 0.5
        asked = self._option(draw, true if yes else false)
        name = asked.name.replace("_", " ")
        if draw.random() < 0.2:
            text = draw.choice(
                (
                    f"Is '{name}' the wrong label for this {self.noun}?",
                    f"Does some other label than {name} fit the {self.noun} better?",
                    f"Is the {self.noun} about something other than {asked.meaning}?",
                    f"Is it false that this {self.noun} is about {asked.meaning}?",
                )
            )
            return state, yes_no(draw, text, not yes)
        text = draw.choice(
            (*self.confirms, *self.confirms, f"Is the right label for this {self.noun} '{{n}}'?", "Is this about {d}?")
        )
        text = text.replace("{d}", asked.meaning).replace("{n}", name)
        sides = (f"The {self.noun} is about {asked.meaning}", f"The {self.noun} is about something else")
        return state, yes_no(draw, text, yes, sides)

    def _score(self, draw: random.Random) -> tuple[Any, Answer]:
        wanted, *others = draw.sample(self.labels, min(3, len(self.labels)))
        asked = self._option(draw, wanted)
        name = asked.name.replace("_", " ")
        total = draw.choice((2, 3, 3, 4, 5))
        hits = draw.randint(0, total)
        texts = [grammar.say(draw, wanted.says) for _ in range(hits)]
        texts += [grammar.say(draw, draw.choice(others).says) for _ in range(total - hits)]
        draw.shuffle(texts)
        state = envelopes.several(draw, texts)
        return state, _share(draw, f"{self.noun}s", (f"are about {asked.meaning}", f"belong to '{name}'"), hits, total)


@dataclass(slots=True)
class Signal:
    """Texts that show something, and texts that do not."""

    name: str
    noun: str
    asks: list[str] = field(default_factory=list)
    denials: list[str] = field(default_factory=list)
    sides: tuple[list[str], list[str]] = ([], [])
    says: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    def make(self, draw: random.Random, kind: Kind) -> Item:
        state, answer = {"choice": self._choice, "noul": self._noul, "score": self._score}[kind](draw)
        return Item(self.name, state, *answer)

    def _noul(self, draw: random.Random) -> tuple[Any, Answer]:
        shown = draw.random() < 0.5
        state = envelopes.wrap(draw, grammar.say(draw, self.says[not shown]), self.noun)
        if draw.random() < 0.3:
            return state, yes_no(draw, draw.choice(self.denials), not shown)
        sides = (draw.choice(self.sides[0]), draw.choice(self.sides[1]))
        return state, yes_no(draw, draw.choice(self.asks), shown, sides)

    def _choice(self, draw: random.Random) -> tuple[Any, Answer]:
        shown = draw.random() < 0.5
        if draw.random() < 0.5:
            state = envelopes.wrap(draw, grammar.say(draw, self.says[not shown]), self.noun)
            options = [Option(draw.choice(side)) for side in self.sides]
            asks = [f"Which describes the {self.noun}?", f"What is true of the {self.noun}?", "Pick the right side."]
            return state, choice(draw, asks, options, int(not shown))
        count = draw.randint(2, 5)
        texts = [grammar.say(draw, self.says[not shown])]
        texts += [grammar.say(draw, self.says[shown]) for _ in range(count - 1)]
        side = draw.choice(self.sides[not shown])
        asks = [f"Which {self.noun} fits the description: {side}?", f"Which one is it: {side}?", f"Find: {side}."]
        if len(set(texts)) < count:
            texts = texts[:1] + [text for text in dict.fromkeys(texts[1:]) if text != texts[0]]
        state = draw.choice(("", side, {"wanted": side}))
        return state, choice(draw, asks, [Option(text) for text in texts], 0)

    def _score(self, draw: random.Random) -> tuple[Any, Answer]:
        total = draw.choice((2, 3, 3, 4, 5))
        hits = draw.randint(0, total)
        shown = draw.random() < 0.7
        texts = [grammar.say(draw, self.says[not shown]) for _ in range(hits)]
        texts += [grammar.say(draw, self.says[shown]) for _ in range(total - hits)]
        draw.shuffle(texts)
        side = draw.choice(self.sides[not shown])
        state = envelopes.several(draw, texts)
        return state, _share(draw, f"{self.noun}s", (f"fit '{side}'", f"are like this: {side}"), hits, total)


@dataclass(slots=True)
class Scale:
    """Texts of five grades, low to high."""

    name: str
    noun: str
    asks: list[str] = field(default_factory=list)
    scales: list[list[str]] = field(default_factory=list)
    high: list[str] = field(default_factory=list)
    """Yes/no questions that grades 4 and 5 answer with yes, grades 1 and 2 with no."""
    says: list[list[str]] = field(default_factory=lambda: [[] for _ in range(5)])

    def make(self, draw: random.Random, kind: Kind) -> Item:
        state, answer = {"choice": self._choice, "noul": self._noul, "score": self._score}[kind](draw)
        return Item(self.name, state, *answer)

    def _state(self, draw: random.Random, grade: int) -> Any:
        return envelopes.wrap(draw, grammar.say(draw, self.says[grade]), self.noun)

    def _score(self, draw: random.Random) -> tuple[Any, Answer]:
        grade = draw.randrange(5)
        names, target = _rescaled(draw.choice(self.scales), grade, draw.choice((5, 5, 5, 4, 3, 3, 2)))
        if draw.random() < 0.15:
            names, target = names[::-1], target[::-1]
        return self._state(draw, grade), score(draw, self.asks, names, target)

    def _noul(self, draw: random.Random) -> tuple[Any, Answer]:
        yes = draw.random() < 0.5
        scale = draw.choice(self.scales)
        roll = draw.random()
        if roll < 0.55:
            grade = draw.choice((3, 4) if yes else (0, 1))
            return self._state(draw, grade), yes_no(draw, draw.choice(self.high), yes, (scale[4], scale[0]))
        if roll < 0.8:
            bound = draw.randrange(1, 5)
            grade = draw.randrange(bound, 5) if yes else draw.randrange(0, bound)
            text = f"On the scale {', '.join(scale)}: is it at least '{scale[bound]}'?"
            if draw.random() < 0.3:
                return self._state(draw, grade), yes_no(draw, text.replace("at least", "below"), not yes)
            return self._state(draw, grade), yes_no(draw, text, yes)
        low, high = sorted(draw.sample(range(5), 2))
        first, second = (high, low) if yes else (low, high)
        texts = [grammar.say(draw, self.says[first]), grammar.say(draw, self.says[second])]
        state = {"first": texts[0], "second": texts[1]} if draw.random() < 0.5 else f"1) {texts[0]}\n2) {texts[1]}"
        text = f"From '{scale[0]}' to '{scale[4]}': does the first {self.noun} rank higher than the second?"
        return state, yes_no(draw, text, yes)

    def _choice(self, draw: random.Random) -> tuple[Any, Answer]:
        scale = draw.choice(self.scales)
        if draw.random() < 0.5:
            names, target = _rescaled(scale, grade := draw.randrange(5), draw.choice((5, 4, 3, 2)))
            return self._state(draw, grade), choice(draw, self.asks, [Option(name) for name in names], target)
        grades = sorted(draw.sample(range(5), draw.randint(2, 4)))
        top = draw.random() < 0.6
        if not top:
            grades.reverse()
        texts = [Option(grammar.say(draw, self.says[grade])) for grade in reversed(grades)]
        end = scale[4] if top else scale[0]
        asks = [f"Which {self.noun} comes closest to '{end}'?", f"Which is nearest to '{end}'? {self.asks[0]}"]
        return draw.choice(("", {"wanted": end})), choice(draw, asks, texts, 0)


def _rescaled(scale: list[str], grade: int, count: int) -> tuple[list[str], list[float]]:
    """The scale with `count` of its five names, and where the grade lies on it."""
    if count == 5:
        return scale, level(5, grade)
    kept = {4: (0, 1, 3, 4), 3: (0, 2, 4), 2: (0, 4)}[count]
    distance = [abs(grade - place) for place in kept]
    weights = [max(0.0, 1.0 - d / 1.5) if min(distance) else float(d == 0) for d in distance]
    if sum(weights) == 0:  # the middle grade of two ends
        weights = [1.0] * count
    total = sum(weights)
    target = [weight / total for weight in weights]
    if min(distance) == 0:
        target = level(count, target.index(1.0), 0.06)
    return [scale[i] for i in kept], target


def _share(draw: random.Random, nouns: str, phrases: tuple[str, ...], hits: int, total: int) -> Answer:
    """How many of the texts fit: counted, or none, some and all."""
    phrase = draw.choice(phrases)
    if draw.random() < 0.6:
        levels = list(_COUNTS[: total + 1])
        if draw.random() < 0.3:
            levels = [str(i) for i in range(total + 1)]
        return score(
            draw,
            (f"How many of the {nouns} {phrase}?", f"Count the {nouns} that {phrase}."),
            levels,
            level(total + 1, hits, 0.06),
        )
    grade = 0 if hits == 0 else 2 if hits == total else 1
    levels = list(
        draw.choice((("none", "some", "all"), ("not at all", "partly", "entirely"), ("no", "in part", "yes")))
    )
    return score(
        draw,
        (f"To what extent is it so that the {nouns} {phrase}?", f"Do the {nouns} fit: they {phrase}?"),
        levels,
        level(3, grade, 0.04),
    )


def read_topics(path: Path) -> Iterator[Topic]:
    """The topics of a bank file."""
    for name, noun, lines in _blocks(path):
        topic = Topic(name, noun)
        for line in lines:
            match line[:2]:
                case "? ":
                    topic.asks = line[2:].split(" | ")
                case "! ":
                    topic.confirms = line[2:].split(" | ")
                case "- ":
                    names, meanings = line[2:].split(" = ")
                    topic.labels.append(_Label(names.split(", "), meanings.split("; ")))
                case _:
                    topic.labels[-1].says.append(line)
        yield topic


def read_signals(path: Path) -> Iterator[Signal]:
    """The signals of a bank file."""
    for name, noun, lines in _blocks(path):
        signal, side = Signal(name, noun), 0
        for line in lines:
            match line[:2]:
                case "? ":
                    signal.asks = line[2:].split(" | ")
                case "~ ":
                    signal.denials = line[2:].split(" | ")
                case "* ":
                    both = [part.split("; ") for part in line[2:].split(" | ")]
                    signal.sides = cast(tuple[list[str], list[str]], tuple(both))
                case "+" | "-":
                    side = int(line == "-")
                case _:
                    signal.says[side].append(line)
        yield signal


def read_scales(path: Path) -> Iterator[Scale]:
    """The scales of a bank file."""
    for name, noun, lines in _blocks(path):
        scale, grade = Scale(name, noun), 0
        for line in lines:
            match line[:2]:
                case "? ":
                    scale.asks = line[2:].split(" | ")
                case "^ ":
                    scale.scales = [names.split(" / ") for names in line[2:].split(" | ")]
                case "> ":
                    scale.high = line[2:].split(" ; ")
                case "1" | "2" | "3" | "4" | "5":
                    grade = int(line) - 1
                case _:
                    scale.says[grade].append(line)
        yield scale


def _blocks(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Name, noun and lines of every block; a block begins with `@ name | noun`."""
    for block in path.read_text(encoding="utf-8").split("@ ")[1:]:
        head, *lines = (line.strip() for line in block.splitlines() if line.strip())
        name, noun = head.split(" | ")
        yield name, noun, lines
