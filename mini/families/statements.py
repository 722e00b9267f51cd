"""Families about what a text says: what follows, what contradicts it, what answers a question."""

import random
from typing import Any

from mini.families import envelopes, grammar
from mini.families.questions import Answer, Option, choice, level, score, yes_no
from mini.items import Kind


def does_it_say(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Whether a statement follows from a text of several sentences."""
    scenes = [_scene(draw) for _ in range(draw.randint(1, 4))]
    premise, follows, against, open_ = draw.choice(scenes)
    state = envelopes.several(draw, [s[0] for s in scenes]) if draw.random() < 0.3 else " ".join(s[0] for s in scenes)
    if kind == "noul":
        yes = draw.random() < 0.5
        claim = draw.choice(follows if yes else against)
        if draw.random() < 0.2:
            return state, yes_no(draw, f"Does the text contradict this: {claim}", not yes)
        forms = (
            f"Is it true that {_lower(claim)[:-1]}?",
            f"According to the text: {claim}",
            f"Does the text say so? {claim}",
            claim,
        )
        return state, yes_no(draw, draw.choice(forms), yes)
    if kind == "choice":
        claims = [draw.choice(follows), *against]
        if len(scenes) == 1:
            claims += open_[:1]
        return state, choice(
            draw,
            ("Which statement is true according to the text?", "What follows from the text?"),
            [Option(claim) for claim in claims],
            0,
        )
    grade = draw.randrange(3)
    claim = draw.choice((against, open_, follows)[grade])
    state = premise if grade == 1 else state
    levels = draw.choice((["contradicted", "left open", "confirmed"], ["false", "cannot be told", "true"]))
    return state, score(draw, (f"How far does the text support this: {claim}",), levels, level(3, grade, 0.06))


def _lower(claim: str) -> str:
    """The claim in the middle of a sentence: only names keep their capital."""
    first = claim.split()[0]
    return claim if first in grammar.words()["name"] or first == "AI" else claim[0].lower() + claim[1:]


def how_they_relate(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Two sentences: the second follows, is contradicted, or is left open."""
    premise, follows, against, open_ = _scene(draw)
    grade = draw.randrange(3)
    claim = draw.choice((follows, open_, against)[grade])
    state = draw.choice(({"sentence_1": premise, "sentence_2": claim}, f"First: {premise} Second: {claim}"))
    if kind == "choice":
        options = [
            Option("follows", "the second must be true if the first is"),
            Option("open", "it may or may not be true"),
            Option("contradicts", "the second cannot be true if the first is"),
        ]
        return state, choice(draw, ("How does the second sentence relate to the first?",), options, grade)
    if kind == "noul":
        yes = draw.random() < 0.5
        claim = draw.choice(follows if yes else draw.choice((against, open_)))
        state = {"sentence_1": premise, "sentence_2": claim}
        return state, yes_no(draw, "Does the second sentence follow from the first?", yes)
    levels = ["the second is ruled out", "it may be so", "the second is certain"]
    return state, score(draw, ("Given the first sentence, how sure is the second?",), levels, level(3, 2 - grade, 0.06))


def answers_the_question(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Snippets about people: which one answers a question?"""
    people = grammar.pick(draw, "name", 4)
    facts = (
        ("Where does <p> live?", "<p> moved to {city} last year."),
        ("What is <p>'s job?", "<p> earns a living as a {job}."),
        ("What does <p> like to eat?", "<p> never says no to {food}."),
        ("Which animal does <p> keep?", "<p> feeds a {animal} every morning."),
        ("On which day is <p> free?", "<p> has no work on {day}."),
        ("What did <p> buy?", "<p> came home with a {product}."),
        ("In which month was <p> born?", "<p> has a birthday in {month}."),
        ("What colour is <p>'s house?", "<p> painted the walls outside {colour}."),
    )
    (question, fact), *rest = draw.sample(facts, 4)
    person, *others = people
    right = grammar.fill(draw, fact.replace("<p>", person))
    near = [grammar.fill(draw, fact.replace("<p>", others[0])), grammar.fill(draw, rest[0][1].replace("<p>", person))]
    far = [grammar.fill(draw, f.replace("<p>", o)) for (_, f), o in zip(rest[1:], others[1:], strict=True)]
    asked = question.replace("<p>", person)
    if kind == "choice":
        texts = [right, *draw.sample([*near, *far], draw.randint(1, 4))]
        if draw.random() < 0.5:
            return {"question": asked}, choice(
                draw, ("Which passage answers the question?",), [Option(t) for t in texts], 0
            )
        order = draw.sample(texts, len(texts))
        marks = [f"p{i + 1}" for i in range(len(order))]
        state: Any = {"question": asked, "passages": dict(zip(marks, order, strict=True))}
        return state, choice(
            draw, ("Which passage answers the question?",), [Option(m) for m in marks], order.index(right)
        )
    if kind == "noul":
        yes = draw.random() < 0.5
        passage = right if yes else draw.choice([*near, *far])
        state = draw.choice(({"question": asked, "passage": passage}, f"Q: {asked}\nPassage: {passage}"))
        if draw.random() < 0.2:
            return state, yes_no(draw, "Does the passage leave the question unanswered?", not yes)
        return state, yes_no(
            draw, draw.choice(("Does the passage answer the question?", "Is the answer in the passage?")), yes
        )
    grade = draw.randrange(3)
    passage = (far[0], draw.choice(near), right)[grade]
    levels = ["has nothing to do with it", "touches it but gives no answer", "gives the answer"]
    state = {"question": asked, "passage": passage}
    return state, score(draw, ("How relevant is the passage to the question?",), levels, level(3, grade, 0.06))


def same_meaning(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Two sentences that say the same, or do not."""
    premise, follows, against, open_ = _scene(draw)
    other = _scene(draw)[0]
    grade = draw.randrange(3)  # 0 another subject, 1 same subject but something else, 2 the same fact
    second = (other, draw.choice([*against, *open_]), follows[0])[grade]
    state = draw.choice(({"a": premise, "b": second}, f"A: {premise}\nB: {second}"))
    if kind == "noul":
        yes = draw.random() < 0.5
        second = follows[0] if yes else draw.choice(against)
        return {"a": premise, "b": second}, yes_no(draw, draw.choice(("Can both be true?", "Do A and B agree?")), yes)
    if kind == "choice":
        options = [Option(follows[0]), Option(against[0]), Option(against[1] if len(against) > 1 else open_[0])]
        return {"sentence": premise}, choice(draw, ("Which sentence agrees with the given one?",), options, 0)
    levels = ["different subjects", "same subject, other fact", "same fact"]
    return state, score(draw, ("How close are the two sentences?",), levels, level(3, grade, 0.1))


def _scene(draw: random.Random) -> tuple[str, list[str], list[str], list[str]]:
    """A premise, what follows from it, what contradicts it, and what it leaves open."""
    a, b = grammar.pick(draw, "name", 2)
    c, d = grammar.pick(draw, "city", 2)
    x, y = grammar.pick(draw, "product", 2)
    j = grammar.fill(draw, "{job}")
    day, other = grammar.pick(draw, "day", 2)
    red, blue = grammar.pick(draw, "colour", 2)
    n = draw.randint(3, 12)
    return draw.choice(
        (
            (
                f"{a} flew from {c} to {d} on {day}.",
                [f"{a} travelled to {d}.", f"{a} left {c}.", f"On {day} {a} was in a plane."],
                [f"{a} stayed in {c} all week.", f"{a} went to {d} by train.", f"{a} flew to {c}."],
                [f"{a} likes {d}.", f"{a} flew with {b}."],
            ),
            (
                f"{a} gave {b} the {red} {x}.",
                [f"{b} got a {x} from {a}.", f"The {x} was {red}.", f"{a} handed over a {x}."],
                [f"{a} kept the {x}.", f"The {x} was {blue}.", f"{b} gave {a} the {x}."],
                [f"{b} needed the {x}.", f"The {x} was new."],
            ),
            (
                f"None of the {n} guests ate the soup.",
                ["The soup was left by the guests.", "No guest had soup."],
                ["Every guest ate the soup.", "Some guests ate the soup."],
                ["The soup was cold.", "The guests were late."],
            ),
            (
                f"All {n} shops in {c} were closed on {day}.",
                [f"One could not shop in {c} on {day}.", f"No shop in {c} was open on {day}."],
                [f"Some shops in {c} were open on {day}.", f"{a} bought a {x} in a shop in {c} on {day}."],
                [f"The shops in {d} were closed.", f"{a} wanted a {x}."],
            ),
            (
                f"{a} is a {j} and has lived in {c} for {n} years.",
                [f"{a} works as a {j}.", f"{a} lives in {c}.", f"{a} has not just moved to {c}."],
                [f"{a} has never lived in {c}.", f"{a} moved to {c} yesterday."],
                [f"{a} was born in {c}.", f"{a} owns a {x}."],
            ),
            (
                f"{a} bought the {x} but not the {y}.",
                [f"{a} has bought a {x}.", f"{a} did not buy the {y}."],
                [f"{a} bought the {y}.", f"{a} bought nothing."],
                [f"The {x} was cheap.", f"{b} bought the {y}."],
            ),
            (
                f"{a} is taller than {b}.",
                [f"{b} is shorter than {a}.", f"{b} is not taller than {a}."],
                [f"{b} is taller than {a}.", f"{a} and {b} are of the same height."],
                [f"{a} is older than {b}.", f"{b} is a {j}."],
            ),
            (
                f"The meeting was moved from {day} to {other}.",
                [f"The meeting is on {other}.", f"The meeting is no longer on {day}."],
                [f"The meeting is still on {day}.", "The date of the meeting was never changed."],
                [f"{a} moved the meeting.", f"The meeting is in {c}."],
            ),
            (
                f"{a} forgot to lock the {red} door before leaving.",
                [f"The door was not locked by {a}.", f"{a} left."],
                [f"{a} locked the door before leaving.", f"{a} has not left."],
                ["A thief came in.", f"{b} was at home."],
            ),
            (
                f"Only {a} has the key to the {x}.",
                [f"{b} has no key to the {x}.", f"{a} can open the {x} with a key."],
                [f"{b} has a key to the {x}.", f"{a} has no key."],
                [f"The {x} is {red}.", f"{b} wants the key."],
            ),
            (
                f"It rained in {c} until {day}; since then the sun has been shining.",
                [f"It was wet in {c} before {day}.", f"After {day} it was dry in {c}."],
                [f"It has rained in {c} without a stop.", f"The sun shone in {c} before {day} and then it rained."],
                [f"{a} has an umbrella.", f"It rained in {d}."],
            ),
            (
                f"{a} failed the exam, unlike {b}.",
                [f"{b} passed the exam.", f"{a} did not pass."],
                [f"{a} passed the exam.", "Both passed the exam.", f"{b} failed the exam."],
                ["The exam was hard.", f"{a} was ill."],
            ),
            (
                f"The {x} costs twice as much as the {y}.",
                [f"The {y} is cheaper than the {x}.", f"The {x} is dearer than the {y}."],
                [f"The {y} is dearer than the {x}.", "Both cost the same."],
                [f"{a} bought the {y}.", f"The {x} is better."],
            ),
        )
    )
