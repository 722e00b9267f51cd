"""Items from WordNet: which definition belongs to a word, what kind of thing it is, what is alike or opposite.

They teach no situation. They give the match between a text and an option a vocabulary of thousands of words.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from mini.families import envelopes
from mini.families.questions import Option, choice, level, score, yes_no
from mini.items import Item
from mini.sources import Archive

_FIELDS = {
    4: ("action", "something people do"),
    5: ("animal", "animals"),
    6: ("artifact", "things that people made"),
    7: ("attribute", "properties of people and things"),
    8: ("body", "parts of the body"),
    9: ("thought", "thinking and knowing"),
    10: ("communication", "speech, writing and signs"),
    11: ("event", "things that happen"),
    12: ("feeling", "feelings"),
    13: ("food", "food and drink"),
    14: ("group", "groups of people or things"),
    15: ("place", "places"),
    17: ("nature", "objects of nature"),
    18: ("person", "kinds of people"),
    19: ("phenomenon", "natural phenomena"),
    20: ("plant", "plants"),
    21: ("possession", "money and property"),
    22: ("process", "natural processes"),
    23: ("quantity", "quantities and units"),
    25: ("shape", "shapes"),
    26: ("state", "states of being"),
    27: ("substance", "substances"),
    28: ("time", "time"),
}
"""Lexicographer files of nouns by number, with a name and what they hold."""


@dataclass(slots=True)
class _Sense:
    key: str
    words: list[str]
    gloss: str
    examples: list[str]
    file: int
    above: list[str] = field(default_factory=list)
    opposites: list[str] = field(default_factory=list)


def lexicon(draw: random.Random, archive: Archive, count: int) -> Iterator[Item]:
    """`count` items of every kind together."""
    common = _common(archive)
    senses = {sense.key: sense for part in ("noun", "verb", "adj", "adv") for sense in _senses(archive, part)}
    for sense in senses.values():
        sense.above = [key for key in sense.above if key in senses]
    usual = [sense for sense in senses.values() if common.get((sense.words[0], sense.key[-1])) == sense.key]
    parts = {part: [s for s in usual if s.key[-1] == part] for part in "nvar"}
    nouns = [sense for sense in parts["n"] if sense.file in _FIELDS and sense.above]
    pairs = [(s, senses[o]) for s in parts["a"] for o in s.opposites if o in senses]
    lines = {sense.key: _line(senses, sense) for sense in nouns}
    for _ in range(count):
        roll = draw.random()
        if roll < 0.32:
            yield _definition(draw, draw.choices(list("nvar"), (6, 3, 3, 1))[0], parts)
        elif roll < 0.52:
            yield _kind_of(draw, nouns, senses, lines)
        elif roll < 0.76:
            yield _word_field(draw, nouns)
        elif roll < 0.88:
            yield _alike(draw, parts, pairs)
        else:
            yield _in_a_sentence(draw, usual)


def _definition(draw: random.Random, part: str, parts: dict[str, list[_Sense]]) -> Item:
    right, *wrong = draw.sample(parts[part], draw.randint(2, 9))
    word = right.words[0]
    roll = draw.random()
    if roll < 0.4:
        options = [Option(sense.words[0]) for sense in (right, *wrong)]
        asks = ("Which word is defined?", "Which word means this?", "Find the word for the definition.")
        return Item(
            "word_for_definition", envelopes.wrap(draw, right.gloss, "definition"), *choice(draw, asks, options, 0)
        )
    if roll < 0.7:
        options = [Option(sense.gloss) for sense in (right, *wrong)]
        asks = (f"What does '{word}' mean?", "Which definition fits the word?", "Explain the word.")
        return Item("definition_of_word", draw.choice((word, {"word": word})), *choice(draw, asks, options, 0))
    yes = draw.random() < 0.5
    shown = right if yes else wrong[0]
    ask = draw.choice((f"Is this a definition of '{word}'?", f"Does the text explain the word '{word}'?"))
    return Item("definition_of_word", shown.gloss, *yes_no(draw, ask, yes))


def _kind_of(draw: random.Random, nouns: list[_Sense], senses: dict[str, _Sense], lines: dict[str, list[str]]) -> Item:
    sense = draw.choice(nouns)
    above = senses[sense.above[0]]
    others: list[_Sense] = []
    while len(others) < 7:
        other = draw.choice(nouns)
        if other.above[0] not in lines[sense.key] and other.above[0] not in [o.key for o in others]:
            others.append(senses[other.above[0]])
    if draw.random() < 0.55:
        kinds = [above, *others[: draw.randint(1, 7)]]
        described = draw.random() < 0.5
        options = [Option(kind.words[0], kind.gloss if described else "") for kind in kinds]
        if len({option.name for option in options}) == len(options):
            state = sense.words[0] if draw.random() < 0.4 else f"{sense.words[0]}: {sense.gloss}"
            asks = (
                f"What kind of thing is a {sense.words[0]}?",
                "To which kind does it belong?",
                "Pick the broader term.",
            )
            return Item("kind_of_thing", envelopes.wrap(draw, state, "word"), *choice(draw, asks, options, 0))
    yes = draw.random() < 0.5
    kind = above if yes else others[0]
    ask = draw.choice((f"Is this a kind of {kind.words[0]}?", f"Does '{kind.words[0]}' name the broader class of it?"))
    return Item(
        "kind_of_thing", envelopes.wrap(draw, f"{sense.words[0]}: {sense.gloss}", "word"), *yes_no(draw, ask, yes)
    )


def _word_field(draw: random.Random, nouns: list[_Sense]) -> Item:
    file = draw.choice(sorted(_FIELDS))
    mine = [sense for sense in nouns if sense.file == file]
    sense = draw.choice(mine)
    text = (
        sense.gloss
        if draw.random() < 0.4
        else f"{sense.words[0]} ({sense.gloss})"
        if draw.random() < 0.6
        else sense.words[0]
    )
    others = draw.sample([other for other in _FIELDS if other != file], 11)
    roll = draw.random()
    if roll < 0.5:
        options = [Option(*_FIELDS[f]) for f in (file, *others[: draw.randint(1, 11)])]
        asks = ("To which field of meaning does it belong?", "What is it about?", "Sort the entry into a field.")
        return Item("field_of_meaning", envelopes.wrap(draw, text, "entry"), *choice(draw, asks, options, 0))
    if roll < 0.75:
        yes = draw.random() < 0.5
        ask = draw.choice(
            ("Does it belong to the field: {}?", "Is the entry one of these: {}?", "Would you file it under {}?")
        )
        ask = ask.format(_FIELDS[file if yes else others[0]][1])
        return Item("field_of_meaning", envelopes.wrap(draw, text, "entry"), *yes_no(draw, ask, yes))
    total = draw.randint(2, 4)
    hits = draw.randint(0, total)
    words = [s.words[0] for s in draw.sample(mine, min(hits, len(mine)))]
    hits = len(words)
    words += [s.words[0] for s in draw.sample([s for s in nouns if s.file == others[0]], total - hits)]
    draw.shuffle(words)
    levels = ["none", "one", "two", "three", "four"][: total + 1]
    ask = f"How many of the words are among {_FIELDS[file][1]}?"
    return Item(
        "field_of_meaning",
        draw.choice((words, ", ".join(words))),
        *score(draw, (ask,), levels, level(total + 1, hits, 0.1)),
    )


def _alike(draw: random.Random, parts: dict[str, list[_Sense]], pairs: list[tuple[_Sense, _Sense]]) -> Item:
    first, second = draw.choice(pairs)
    stranger = draw.choice(parts["a"])
    twins = [s for s in draw.sample(parts["n"] + parts["v"] + parts["a"], 60) if len(s.words) > 1]
    twin = twins[0]
    grade = draw.randrange(3)
    words = ((first.words[0], second.words[0]), (first.words[0], stranger.words[0]), (twin.words[0], twin.words[1]))[
        grade
    ]
    state = draw.choice((f"{words[0]} / {words[1]}", {"first": words[0], "second": words[1]}))
    if draw.random() < 0.5:
        levels = ["opposite meaning", "no clear relation", "same meaning"]
        return Item(
            "alike_or_opposite", state, *score(draw, ("How are the two words related?",), levels, level(3, grade, 0.06))
        )
    options = [Option("opposites"), Option("unrelated"), Option("synonyms")]
    return Item("alike_or_opposite", state, *choice(draw, ("What are the two words to each other?",), options, grade))


def _in_a_sentence(draw: random.Random, usual: list[_Sense]) -> Item:
    while True:
        sense = draw.choice(usual)
        if sense.examples:
            break
    same = [s for s in draw.sample(usual, 40) if s.key[-1] == sense.key[-1]]
    options = [Option(sense.gloss), *(Option(other.gloss) for other in same[: draw.randint(1, 5)])]
    asks = (f"What does '{sense.words[0]}' mean in the sentence?", f"Which sense of '{sense.words[0]}' is meant?")
    if len({option.name for option in options}) < len(options):
        options = options[:2]
    return Item(
        "word_in_sentence",
        envelopes.wrap(draw, draw.choice(sense.examples), "sentence"),
        *choice(draw, asks, options, 0),
    )


def _line(senses: dict[str, _Sense], sense: _Sense) -> list[str]:
    """Everything a sense is a kind of, itself first."""
    line, waiting = [sense.key], list(sense.above)
    while waiting:
        key = waiting.pop()
        if key in senses and key not in line:
            line.append(key)
            waiting += senses[key].above
    return line


def _common(archive: Archive) -> dict[tuple[str, str], str]:
    """Words whose senses were counted in tagged text, with their first sense."""
    found = {}
    for part, short in (("noun", "n"), ("verb", "v"), ("adj", "a"), ("adv", "r")):
        for row in archive.text(f"package/dict/index.{part}").splitlines():
            if row.startswith(" "):
                continue
            fields = row.split()
            word, pointers = fields[0], int(fields[3])
            tagged, first = int(fields[5 + pointers]), fields[6 + pointers]
            if tagged and re.fullmatch(r"[a-z]+(_[a-z]+)?", word) and len(word) > 2:
                found[word.replace("_", " "), short] = f"{first}{short}"
    return found


def _senses(archive: Archive, part: str) -> Iterator[_Sense]:
    short = part[0] if part != "adv" else "r"
    for row in archive.text(f"package/dict/data.{part}").splitlines():
        if row.startswith(" "):
            continue
        head, _, gloss = row.partition(" | ")
        fields = head.split()
        size = int(fields[3], 16)
        words = [re.sub(r"\(.*\)", "", word).replace("_", " ") for word in fields[4 : 4 + 2 * size : 2]]
        pointers = fields[5 + 2 * size :]
        links = [tuple(pointers[i : i + 3]) for i in range(0, 4 * int(fields[4 + 2 * size]), 4)]
        meaning, *examples = (piece.strip().strip('"') for piece in gloss.split('; "'))
        if 8 < len(meaning) < 160:
            yield _Sense(
                f"{fields[0]}{short}",
                words,
                meaning.rstrip("; "),
                [example.rstrip('"; ') for example in examples if len(example) > 12],
                int(fields[1]),
                [f"{target}{kind}" for mark, target, kind in links if mark in ("@", "@i")],
                [f"{target}{kind}" for mark, target, kind in links if mark == "!"],
            )
