"""Families about rules with several parts."""

import random
from typing import Any

from mini.families import grammar
from mini.families.questions import Answer, Option, choice, level, score, yes_no
from mini.items import Kind

_COUNTS = ("none", "one", "two", "three", "four", "five")


def both_conditions(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """A rule that joins two conditions with "and" or "or"."""
    conditions = (
        ("the form is signed", "signed", "not signed"),
        ("the fee is paid", "paid", "unpaid"),
        ("the photo is attached", "photo attached", "photo missing"),
        ("the manager agrees", "manager agrees", "manager refuses"),
        ("the address is complete", "address complete", "address incomplete"),
        ("the test was passed", "test passed", "test failed"),
        ("the room is free", "room free", "room taken"),
    )
    (rule_a, yes_a, no_a), (rule_b, yes_b, no_b) = draw.sample(conditions, 2)
    joint = draw.random() < 0.6
    want = draw.random() < 0.5
    pairs = [(x, y) for x in (True, False) for y in (True, False) if ((x and y) if joint else (x or y)) == want]
    a, b = draw.choice(pairs)
    who = grammar.fill(draw, "{name}")
    verb = draw.choice(("The request is granted", "We go ahead", "The card is issued"))
    rule = f"{verb} {'only if' if joint else 'if'} {rule_a} {'and' if joint else 'or'} {rule_b}."
    facts = [yes_a if a else no_a, yes_b if b else no_b]
    draw.shuffle(facts)
    state: Any = draw.choice(
        (f"{rule} {who}: {facts[0]}, {facts[1]}.", {"rule": rule, "facts": facts, "applicant": who})
    )
    if kind == "noul":
        if draw.random() < 0.2:
            return state, yes_no(draw, f"Must {who} be turned down?", not want)
        return state, yes_no(draw, draw.choice(("Is the rule satisfied?", f"Can it go ahead for {who}?")), want)
    if kind == "choice":
        options = [Option("go_ahead", "the rule is satisfied"), Option("stop", "the rule is not satisfied")]
        return state, choice(draw, ("Apply the rule.", "What should be done?"), options, int(not want))
    return state, score(
        draw, ("How many of the two conditions are met?",), ["none", "one", "both"], level(3, a + b, 0.06)
    )


def house_rules(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """A short list of rules and what somebody did or asks for: which rule does it break?"""
    rules = draw.sample(_RULES, draw.randint(2, 5))
    broken = draw.random() < 0.5
    hit = draw.randrange(len(rules))
    deed = grammar.say(draw, list(rules[hit][1 if broken else 2]))
    marks = (
        draw.sample(("I", "II", "III", "IV", "V"), len(rules))
        if draw.random() < 0.3
        else [str(i + 1) for i in range(len(rules))]
    )
    listed = [f"{mark}. {rule[0]}" for mark, rule in zip(marks, rules, strict=True)]
    state: Any = draw.choice(
        ({"rules": listed, "event": deed}, "\n".join(listed) + f"\n\n{deed}", f"{deed}\n\nRules: {' '.join(listed)}")
    )
    if kind == "noul":
        if draw.random() < 0.5:
            return state, yes_no(draw, draw.choice(("Is a rule broken?", "Does this go against the rules?")), broken)
        return state, yes_no(
            draw, draw.choice(("Is this allowed by the rules?", "Does this keep all the rules?")), not broken
        )
    if kind == "choice":
        options = [Option(f"rule_{mark}", rule[0]) for mark, rule in zip(marks, rules, strict=True)]
        options.append(Option("no_rule", "no rule is broken"))
        return state, choice(
            draw, ("Which rule is broken?", "Against which rule does it go?"), options, hit if broken else len(rules)
        )
    heavy = {mark: draw.random() < 0.5 for mark in marks}
    text = ", ".join(f"rule {mark} {'heavy' if heavy[mark] else 'light'}" for mark in marks)
    place = 0 if not broken else 2 if heavy[marks[hit]] else 1
    ask = f"How grave is it? Breaking weighs: {text}."
    return state, score(
        draw, (ask,), ["no rule broken", "a light rule broken", "a heavy rule broken"], level(3, place, 0.06)
    )


_RULES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "No animals in the house.",
        ("{name} brought a {animal} to the {room}.", "A {animal} sleeps in {name}'s bed."),
        ("{name} left the {animal} with a neighbour.", "{name} has a plant in the {room}."),
    ),
    (
        "Quiet after ten in the evening.",
        ("{name} played the drums at midnight.", "At eleven {name} sang loudly in the hall."),
        ("{name} played the drums at noon.", "At nine in the evening {name} sang in the hall."),
    ),
    (
        "Smoking is allowed outdoors only.",
        ("{name} smoked a cigar in the {room}.", "{name} lit a cigarette in the lift."),
        ("{name} smoked a cigar in the yard.", "{name} went out on the street for a cigarette."),
    ),
    (
        "Visitors sign the book at the door.",
        ("A visitor walked in without signing.", "{name}'s guest slipped past the book."),
        ("A visitor signed the book and walked in.", "{name}'s guest wrote a name in the book."),
    ),
    (
        "Bicycles stay in the cellar.",
        ("{name} parked a bicycle in the hall.", "A {colour} bike leans against the stairs."),
        ("{name} carried the bicycle down to the cellar.", "{name}'s bike is in the cellar."),
    ),
    (
        "Tools go back to the rack in the evening.",
        ("{name} left the drill lying out overnight.", "At night the saw was still on {name}'s bench."),
        ("{name} hung the drill back before leaving.", "In the evening the saw was on the rack."),
    ),
    (
        "Helmets must be worn on the site.",
        ("{name} climbed the scaffold bareheaded.", "{name} took the helmet off under the crane."),
        ("{name} climbed the scaffold with a helmet on.", "{name} kept the helmet on under the crane."),
    ),
    (
        "Photos of guests need their consent.",
        ("{name} secretly took pictures of a guest.", "{name} posted a guest's photo without asking."),
        ("{name} asked the guest and then took a picture.", "{name} took photos of the empty {room}."),
    ),
    (
        "Food must not be taken into the library.",
        ("{name} ate {food} between the shelves.", "There is {food} on the reading desk of {name}."),
        ("{name} ate {food} in the canteen.", "{name} read a book about {food} in the library."),
    ),
    (
        "Cash payments end at five hundred euros.",
        ("{name} paid 900 euros in notes.", "{name} wants to hand over 1,200 euros in cash."),
        ("{name} paid 80 euros in notes.", "{name} paid 900 euros by card."),
    ),
    (
        "Keys are never lent to third parties.",
        ("{name} lent the key to a cousin.", "{name} gave the plumber's friend the key for a day."),
        ("{name} keeps the key on a chain.", "{name} opened the door for the plumber and stayed."),
    ),
    (
        "Staff do not accept gifts.",
        ("{name} took a {product} from a client as a present.", "{name} kept the tickets that {company} gave."),
        ("{name} sent the client's present back.", "{name} bought a {product} for {money}."),
    ),
    (
        "Passwords are not written down.",
        ("{name}'s password is on a note at the screen.", "{name} wrote the password in the diary."),
        ("{name} keeps the password in mind.", "{name} wrote a shopping list."),
    ),
    (
        "Fire doors stay closed.",
        ("{name} wedged the fire door open with a chair.", "The fire door by {name}'s {room} stands open."),
        ("{name} shut the fire door.", "{name} opened the window of the {room}."),
    ),
)


def points_rule(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Points added up by a stated rule."""
    parts = draw.sample(
        (
            ("garden", "a garden"),
            ("balcony", "a balcony"),
            ("lift", "a lift"),
            ("garage", "a garage"),
            ("view", "a view"),
            ("fireplace", "a fireplace"),
            ("cellar_room", "a cellar"),
        ),
        draw.randint(2, 4),
    )
    has = [draw.random() < 0.5 for _ in parts]
    total = sum(has)
    rule = "A flat gets one point each for " + ", ".join(label for _, label in parts) + "."
    facts: Any = {key: "yes" if h else "no" for (key, _), h in zip(parts, has, strict=True)}
    told = [label for (_, label), h in zip(parts, has, strict=True) if h]
    if draw.random() < 0.5:
        facts = (
            f"The flat in {grammar.fill(draw, '{street}')} has "
            + (" and ".join(told) if told else "none of these")
            + "."
        )
    state: Any = {"flat": facts} if draw.random() < 0.5 else {"rule": rule, "flat": facts}
    levels = [str(i) for i in range(len(parts) + 1)]
    if kind == "score":
        return state, score(draw, (f"{rule} How many points?",), levels, level(len(levels), total, 0.12))
    if kind == "choice":
        return state, choice(
            draw, (f"{rule} How many points does it get?",), [Option(f"{i} points") for i in range(len(levels))], total
        )
    bound = draw.randint(1, len(parts))
    return state, yes_no(draw, f"{rule} Does the flat reach {bound} points?", total >= bound)


def steps_rule(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """A grade found by a base and additions: base by kind, plus one for each stated circumstance, with a top."""
    base_of, extras = draw.choice(_STEPS)
    kinds = list(base_of)
    chosen = draw.choice(kinds)
    kept = draw.sample(extras, draw.randint(1, len(extras)))
    holds = [draw.random() < 0.5 for _ in kept]
    top = max(base_of.values()) + draw.randint(0, len(kept))
    grade = min(top, base_of[chosen] + sum(holds))
    rule = ", ".join(f"{k} {v}" for k, v in base_of.items())
    added = ", ".join(f"one more if {text}" for text, _, _ in kept)
    told = ". ".join(yes if h else no for (_, yes, no), h in zip(kept, holds, strict=True))
    case = f"Kind: {chosen}. {told}."
    ask = f"Grade by the rule: {rule}; {added}; never above {top}."
    state: Any = draw.choice((case, {"case": case}))
    count = top + 1
    if kind == "score":
        levels = [f"grade {i}" for i in range(count)] if count > 1 else ["grade 0", "grade 1"]
        return state, score(draw, (ask,), levels, level(len(levels), grade, 0.15))
    if kind == "choice":
        options = [Option(f"grade {i}") for i in range(max(2, count))]
        return state, choice(draw, (ask,), options, grade)
    bound = draw.randint(1, max(1, top))
    return state, yes_no(draw, f"{ask} Is the grade {bound} or higher?", grade >= bound)


_STEPS: tuple[tuple[dict[str, int], tuple[tuple[str, str, str], ...]], ...] = (
    (
        {"walk": 0, "hike": 1, "climb": 2},
        (
            ("it rains", "It rains", "It is dry"),
            ("it is dark", "Night falls", "It is broad daylight"),
            ("the group is new", "All are beginners", "All are old hands"),
        ),
    ),
    (
        {"letter": 0, "parcel": 1, "crate": 2},
        (
            ("it is fragile", "Marked fragile", "Nothing can break"),
            ("it goes abroad", "It goes abroad", "It stays in the country"),
        ),
    ),
    (
        {"snack": 0, "meal": 1, "banquet": 2},
        (
            ("there are many guests", "Eighty guests come", "Four guests come"),
            ("it is a holiday", "It is a holiday", "It is an ordinary day"),
        ),
    ),
    (
        {"scratch": 0, "cut": 1, "fracture": 2},
        (
            ("the patient is old", "The patient is ninety", "The patient is thirty"),
            ("it bleeds", "It bleeds", "No blood is seen"),
        ),
    ),
)


def exception_rule(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """A rule with one exception."""
    rule, normal, special, yes_when_normal, ask, no_ask = draw.choice(_EXCEPTIONS)
    is_special = draw.random() < 0.5
    fact = grammar.say(draw, list(special if is_special else normal))
    yes = yes_when_normal != is_special
    state: Any = draw.choice((f"{rule} {fact}", {"rule": rule, "case": fact}, f"{fact}\n({rule})"))
    if kind == "noul":
        if draw.random() < 0.3:
            return state, yes_no(draw, no_ask, not yes)
        return state, yes_no(draw, ask, yes)
    if kind == "choice":
        options = [Option("the rule applies", ""), Option("the exception applies", "")]
        return state, choice(
            draw, ("Does the rule or its exception apply?", "Rule or exception?"), options, int(is_special)
        )
    wrongs = [grammar.say(draw, list(normal)) for _ in range(draw.randint(0, 2))]
    rights = [grammar.say(draw, list(special)) for _ in range(draw.randint(0, 2))]
    cases = [*wrongs, *rights] or [fact]
    hits = len(rights) if wrongs or rights else int(is_special)
    draw.shuffle(cases)
    levels = list(_COUNTS[: len(cases) + 1])
    state = {"rule": rule, "cases": cases} if len(levels) > 1 else state
    return state, score(
        draw, ("How many of the cases fall under the exception?",), levels, level(len(levels), hits, 0.08)
    )


_EXCEPTIONS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], bool, str, str], ...] = (
    (
        "Dogs must stay outside, guide dogs excepted.",
        ("{name} comes with a poodle.", "{name} brings a puppy on a lead."),
        ("{name}, who is blind, comes with a guide dog.", "A guide dog leads {name}."),
        False,
        "May the dog come in?",
        "Must the dog stay outside?",
    ),
    (
        "The museum costs eight euros, children go free.",
        ("{name}, thirty years old, wants a ticket.", "{name} the {job} queues."),
        ("{name}, six years old, wants to go in.", "{name} is a child of four."),
        True,
        "Must the visitor pay?",
        "Does the visitor go in free?",
    ),
    (
        "The shop is open every day but {day}.".replace("{day}", "Sunday"),
        ("Today is [Monday|Tuesday|Wednesday|Friday|Saturday].",),
        ("Today is Sunday.", "It is Sunday morning."),
        True,
        "Is the shop open?",
        "Is the shop closed?",
    ),
    (
        "All guests pay in advance, members excepted.",
        ("{name} is no member.", "{name} is here for the first time and never joined."),
        ("{name} is a member.", "{name} joined the club in {month} and shows the member card."),
        True,
        "Must the guest pay in advance?",
        "May the guest pay later?",
    ),
    (
        "Deliveries go out by van; fragile goods are carried by hand.",
        ("The box holds [books|nails|potatoes].",),
        ("The box holds [crystal glasses|old porcelain|eggs].",),
        True,
        "Does it go by van?",
        "Is it carried by hand?",
    ),
    (
        "Nobody is let in after eight, staff excepted.",
        ("{name}, a visitor, comes at nine.", "At half past eight a tourist rings."),
        ("{name}, who works here, comes at nine.", "At half past eight the night nurse, a colleague, rings."),
        False,
        "Is the person let in?",
        "Is the person kept out?",
    ),
)
