"""Families about rules with several parts, dates, order, and whether a text says something."""

import datetime
import random
from typing import Any

from mini.families import envelopes, grammar
from mini.families.questions import Answer, Option, choice, level, score, yes_no
from mini.items import Kind

_COUNTS = ("none", "one", "two", "three", "four", "five")
_DATES = ("%Y-%m-%d", "%d %B %Y", "%B %d, %Y", "%d.%m.%Y")


def _day(draw: random.Random) -> datetime.date:
    return datetime.date(2025, 1, 1) + datetime.timedelta(days=draw.randrange(700))


def return_window(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Days since a purchase against a return window, sometimes with a condition on the goods."""
    window = draw.choice((7, 10, 14, 21, 28, 45, 60, 100))
    flaw, demand = draw.choice(
        (("worn", "for unworn goods"), ("opened", "for unopened goods"), ("without the slip", "with the till slip"))
    )
    conditional = draw.random() < 0.4
    verdict = draw.randrange(2)  # 0 accepted, 1 refused
    spoiled = conditional and verdict == 1 and draw.random() < 0.4
    late = verdict == 1 and not spoiled
    days = window + draw.randint(1, 2 * window) if late else draw.randint(0, window)
    fine = {"worn": "never worn", "opened": "still sealed", "without the slip": "slip enclosed"}[flaw]
    rule = draw.choice(("We take articles back up to {w} days after the sale{c}.", "Articles may come back within {w} days{c}."))
    rule = rule.format(w=window, c=f", {demand} only" if conditional else "")
    when = f"{days} days" if days % 7 or draw.random() < 0.5 or days == 0 else f"{days // 7} weeks"
    case = grammar.fill(draw, f"{{name}} bought the {{product}} {when} ago" + (f", {flaw if spoiled else fine}" if conditional else ""))
    state = draw.choice((f"{rule} {case}.", {"rule": rule, "case": case}, f"Case: {case}.\nShop rule: {rule}"))
    if kind == "noul":
        asks = ("Does the shop take it back?", "Is the article returned in time and in order?", "Should the return be accepted?")
        if draw.random() < 0.2:
            return state, yes_no(draw, "Must the return be refused?", verdict == 1)
        return state, yes_no(draw, draw.choice(asks), verdict == 0)
    if kind == "choice":
        options = [Option("accept", "in time and in order"), Option("too_late", "the days are over")]
        if conditional:
            options.append(Option("bad_condition", f"in time, but {flaw}"))
        return state, choice(draw, ("Decide on the return.", "What is the result?"), options, 2 if spoiled else int(late))
    place = 0 if days <= window // 2 else 1 if days <= window else 2 if days <= 2 * window else 3
    levels = ["well within the days", "within the days", "over the days", "more than twice the days"]
    return state, score(draw, ("How late is the return?", "How much of the time was used?"), levels, level(4, place, 0.1))


def deadline(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Whether a date comes before or after a deadline."""
    due, form = _day(draw), draw.choice(_DATES)
    gap = draw.choice((-60, -20, -5, -1, 0, 1, 5, 20, 60, 200)) + draw.randint(-1, 1)
    done = due + datetime.timedelta(days=gap)
    thing, name = grammar.fill(draw, "{thing}"), grammar.fill(draw, "{name}")
    state: Any = draw.choice(
        (
            f"{thing} was due on {due.strftime(form)}. {name} handed it in on {done.strftime(form)}.",
            {"due": due.strftime(form), "handed_in": done.strftime(form), "what": thing},
            f"Handed in by {name}: {done.strftime(form)}. Last day: {due.strftime(form)}.",
        )
    )
    if kind == "noul":
        if draw.random() < 0.5:
            return state, yes_no(draw, draw.choice(("Was it late?", "Was the last day missed?")), gap > 0)
        return state, yes_no(draw, draw.choice(("Was it in time?", "Was the last day kept?")), gap <= 0)
    if kind == "choice":
        options = [Option("early", "before the last day"), Option("just_in_time", "on the last day"), Option("late", "after the last day")]
        return state, choice(draw, ("When was it handed in?",), options, (gap > 0) - (gap < 0) + 1)
    place = 0 if gap <= 0 else 1 if gap <= 7 else 2 if gap <= 31 else 3
    levels = ["not late", "late by a week at most", "late by a month at most", "later than that"]
    return state, score(draw, ("How late was it?",), levels, level(4, place, 0.1))


def expiry(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Whether something is still valid today."""
    today, form = _day(draw), draw.choice(_DATES)
    left = draw.choice((-400, -90, -20, -3, 0, 3, 20, 90, 400)) + draw.randint(-1, 1)
    end = today + datetime.timedelta(days=left)
    what = draw.choice(("passport", "licence", "ticket", "voucher", "certificate", "medicine", "milk", "contract", "visa"))
    state: Any = draw.choice(
        (
            {"today": today.strftime(form), what: {"valid_until": end.strftime(form)}},
            f"The {what} is valid until {end.strftime(form)}. Today is {today.strftime(form)}.",
            f"Date: {today.strftime(form)}\n{what} expires: {end.strftime(form)}",
        )
    )
    if kind == "noul":
        if draw.random() < 0.4:
            return state, yes_no(draw, f"Has the {what} expired?", left < 0)
        return state, yes_no(draw, f"Is the {what} still valid?", left >= 0)
    if kind == "choice":
        options = [Option("valid", "can be used today"), Option("expired", "the time is over")]
        return state, choice(draw, (f"What is the state of the {what}?",), options, int(left < 0))
    place = 0 if left < 0 else 1 if left <= 7 else 2 if left <= 120 else 3
    levels = ["expired", "a week or less left", "some months left", "a long time left"]
    return state, score(draw, ("How much time is left?",), levels, level(4, place, 0.1))


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
    state = draw.choice((table, "; ".join(f"{n}: {v} {unit}" for n, v in table.items()), {"unit": unit, "values": table}))
    top = draw.random() < 0.5
    best = (max if top else min)(names, key=table.__getitem__)
    word = most if top else least
    if kind == "choice":
        return state, choice(draw, (f"Who or what is the {word}?", f"Which is the {word} ({unit})?"),
                             [Option(n) for n in names], names.index(best))  # fmt: skip
    if kind == "noul":
        first, second = draw.sample(names, 2)
        if draw.random() < 0.5:
            return state, yes_no(draw, f"Does {first} have more {unit.split()[0]} than {second}?", table[first] > table[second])
        yes = draw.random() < 0.5
        asked = best if yes else draw.choice([n for n in names if n != best])
        return state, yes_no(draw, f"Is {asked} the {word}?", yes)
    bound = draw.randint(10, 80)
    hits = sum(v > bound for v in values)
    levels = [str(i) for i in range(count + 1)]
    return state, score(draw, (f"How many of them have more than {bound} {unit}?",), levels, level(count + 1, hits, 0.1))


def meeting_overlap(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Whether two appointments meet."""
    days = grammar.words()["day"]
    a, length, b = draw.randint(8, 15), draw.randint(1, 3), draw.randint(8, 16)
    first = draw.choice(days)
    second = first if draw.random() < 0.8 else draw.choice(days)
    gap = max(a, b) - min(a + length, b + 1)
    overlap = first == second and gap < 0
    if draw.random() < 0.5 and not overlap:  # half of the cases should overlap
        second, b = first, draw.randint(a, a + length - 1)
        overlap = True
    state = draw.choice(
        (
            f"Planned: {first} {a}:00 to {a + length}:00. Asked for: {second} {b}:00 to {b + 1}:00.",
            {"planned": {"day": first, "from": a, "to": a + length}, "asked_for": {"day": second, "from": b, "to": b + 1}},
        )
    )
    if kind == "noul":
        if draw.random() < 0.4:
            return state, yes_no(draw, "Is the time asked for still free?", not overlap)
        return state, yes_no(draw, draw.choice(("Do the two times collide?", "Is there a clash?")), overlap)
    if kind == "choice":
        options = [Option("accept", "the time is free"), Option("propose_other_time", "the times collide")]
        return state, choice(draw, ("How should the assistant answer?",), options, int(overlap))
    hours = max(0, min(a + length, b + 1) - max(a, b)) if first == second else 0
    place = 0 if not hours else 1 if hours < length else 2
    return state, score(draw, ("How much of the planned time would be taken?",), ["nothing", "a part", "all of it"], level(3, place, 0.08))


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
    state: Any = draw.choice((f"{rule} {who}: {facts[0]}, {facts[1]}.", {"rule": rule, "facts": facts, "applicant": who}))
    if kind == "noul":
        if draw.random() < 0.2:
            return state, yes_no(draw, f"Must {who} be turned down?", not want)
        return state, yes_no(draw, draw.choice(("Is the rule satisfied?", f"Can it go ahead for {who}?")), want)
    if kind == "choice":
        options = [Option("go_ahead", "the rule is satisfied"), Option("stop", "the rule is not satisfied")]
        return state, choice(draw, ("Apply the rule.", "What should be done?"), options, int(not want))
    return state, score(draw, ("How many of the two conditions are met?",), ["none", "one", "both"], level(3, a + b, 0.06))


def house_rules(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """A short list of rules and what somebody did or asks for: which rule does it break?"""
    rules = draw.sample(_RULES, draw.randint(2, 5))
    broken = draw.random() < 0.5
    hit = draw.randrange(len(rules))
    deed = grammar.say(draw, list(rules[hit][1 if broken else 2]))
    marks = draw.sample(("I", "II", "III", "IV", "V"), len(rules)) if draw.random() < 0.3 else [str(i + 1) for i in range(len(rules))]
    listed = [f"{mark}. {rule[0]}" for mark, rule in zip(marks, rules, strict=True)]
    state: Any = draw.choice(({"rules": listed, "event": deed}, "\n".join(listed) + f"\n\n{deed}", f"{deed}\n\nRules: {' '.join(listed)}"))
    if kind == "noul":
        if draw.random() < 0.5:
            return state, yes_no(draw, draw.choice(("Is a rule broken?", "Does this go against the rules?")), broken)
        return state, yes_no(draw, draw.choice(("Is this allowed by the rules?", "Does this keep all the rules?")), not broken)
    if kind == "choice":
        options = [Option(f"rule_{mark}", rule[0]) for mark, rule in zip(marks, rules, strict=True)]
        options.append(Option("no_rule", "no rule is broken"))
        return state, choice(draw, ("Which rule is broken?", "Against which rule does it go?"), options, hit if broken else len(rules))
    heavy = {mark: draw.random() < 0.5 for mark in marks}
    text = ", ".join(f"rule {mark} {'heavy' if heavy[mark] else 'light'}" for mark in marks)
    place = 0 if not broken else 2 if heavy[marks[hit]] else 1
    ask = f"How grave is it? Breaking weighs: {text}."
    return state, score(draw, (ask,), ["no rule broken", "a light rule broken", "a heavy rule broken"], level(3, place, 0.06))


_RULES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("No animals in the house.", ("{name} brought a {animal} to the {room}.", "A {animal} sleeps in {name}'s bed."),
     ("{name} left the {animal} with a neighbour.", "{name} has a plant in the {room}.")),
    ("Quiet after ten in the evening.", ("{name} played the drums at midnight.", "At eleven {name} sang loudly in the hall."),
     ("{name} played the drums at noon.", "At nine in the evening {name} sang in the hall.")),
    ("Smoking is allowed outdoors only.", ("{name} smoked a cigar in the {room}.", "{name} lit a cigarette in the lift."),
     ("{name} smoked a cigar in the yard.", "{name} went out on the street for a cigarette.")),
    ("Visitors sign the book at the door.", ("A visitor walked in without signing.", "{name}'s guest slipped past the book."),
     ("A visitor signed the book and walked in.", "{name}'s guest wrote a name in the book.")),
    ("Bicycles stay in the cellar.", ("{name} parked a bicycle in the hall.", "A {colour} bike leans against the stairs."),
     ("{name} carried the bicycle down to the cellar.", "{name}'s bike is in the cellar.")),
    ("Tools go back to the rack in the evening.", ("{name} left the drill lying out overnight.", "At night the saw was still on {name}'s bench."),
     ("{name} hung the drill back before leaving.", "In the evening the saw was on the rack.")),
    ("Helmets must be worn on the site.", ("{name} climbed the scaffold bareheaded.", "{name} took the helmet off under the crane."),
     ("{name} climbed the scaffold with a helmet on.", "{name} kept the helmet on under the crane.")),
    ("Photos of guests need their consent.", ("{name} secretly took pictures of a guest.", "{name} posted a guest's photo without asking."),
     ("{name} asked the guest and then took a picture.", "{name} took photos of the empty {room}.")),
    ("Food must not be taken into the library.", ("{name} ate {food} between the shelves.", "There is {food} on the reading desk of {name}."),
     ("{name} ate {food} in the canteen.", "{name} read a book about {food} in the library.")),
    ("Cash payments end at five hundred euros.", ("{name} paid 900 euros in notes.", "{name} wants to hand over 1,200 euros in cash."),
     ("{name} paid 80 euros in notes.", "{name} paid 900 euros by card.")),
    ("Keys are never lent to third parties.", ("{name} lent the key to a cousin.", "{name} gave the plumber's friend the key for a day."),
     ("{name} keeps the key on a chain.", "{name} opened the door for the plumber and stayed.")),
    ("Staff do not accept gifts.", ("{name} took a {product} from a client as a present.", "{name} kept the tickets that {company} gave."),
     ("{name} sent the client's present back.", "{name} bought a {product} for {money}.")),
    ("Passwords are not written down.", ("{name}'s password is on a note at the screen.", "{name} wrote the password in the diary."),
     ("{name} keeps the password in mind.", "{name} wrote a shopping list.")),
    ("Fire doors stay closed.", ("{name} wedged the fire door open with a chair.", "The fire door by {name}'s {room} stands open."),
     ("{name} shut the fire door.", "{name} opened the window of the {room}.")),
)  # fmt: skip


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
            (f"{a} flew from {c} to {d} on {day}.", [f"{a} travelled to {d}.", f"{a} left {c}.", f"On {day} {a} was in a plane."],
             [f"{a} stayed in {c} all week.", f"{a} went to {d} by train.", f"{a} flew to {c}."], [f"{a} likes {d}.", f"{a} flew with {b}."]),
            (f"{a} gave {b} the {red} {x}.", [f"{b} got a {x} from {a}.", f"The {x} was {red}.", f"{a} handed over a {x}."],
             [f"{a} kept the {x}.", f"The {x} was {blue}.", f"{b} gave {a} the {x}."], [f"{b} needed the {x}.", f"The {x} was new."]),
            (f"None of the {n} guests ate the soup.", ["The soup was left by the guests.", "No guest had soup."],
             ["Every guest ate the soup.", "Some guests ate the soup."], ["The soup was cold.", "The guests were late."]),
            (f"All {n} shops in {c} were closed on {day}.", [f"One could not shop in {c} on {day}.", f"No shop in {c} was open on {day}."],
             [f"Some shops in {c} were open on {day}.", f"{a} bought a {x} in a shop in {c} on {day}."], [f"The shops in {d} were closed.", f"{a} wanted a {x}."]),
            (f"{a} is a {j} and has lived in {c} for {n} years.", [f"{a} works as a {j}.", f"{a} lives in {c}.", f"{a} has not just moved to {c}."],
             [f"{a} has never lived in {c}.", f"{a} moved to {c} yesterday."], [f"{a} was born in {c}.", f"{a} owns a {x}."]),
            (f"{a} bought the {x} but not the {y}.", [f"{a} has bought a {x}.", f"{a} did not buy the {y}."],
             [f"{a} bought the {y}.", f"{a} bought nothing."], [f"The {x} was cheap.", f"{b} bought the {y}."]),
            (f"{a} is taller than {b}.", [f"{b} is shorter than {a}.", f"{b} is not taller than {a}."],
             [f"{b} is taller than {a}.", f"{a} and {b} are of the same height."], [f"{a} is older than {b}.", f"{b} is a {j}."]),
            (f"The meeting was moved from {day} to {other}.", [f"The meeting is on {other}.", f"The meeting is no longer on {day}."],
             [f"The meeting is still on {day}.", "The date of the meeting was never changed."], [f"{a} moved the meeting.", f"The meeting is in {c}."]),
            (f"{a} forgot to lock the {red} door before leaving.", [f"The door was not locked by {a}.", f"{a} left."],
             [f"{a} locked the door before leaving.", f"{a} has not left."], [f"A thief came in.", f"{b} was at home."]),
            (f"Only {a} has the key to the {x}.", [f"{b} has no key to the {x}.", f"{a} can open the {x} with a key."],
             [f"{b} has a key to the {x}.", f"{a} has no key."], [f"The {x} is {red}.", f"{b} wants the key."]),
            (f"It rained in {c} until {day}; since then the sun has been shining.", [f"It was wet in {c} before {day}.", f"After {day} it was dry in {c}."],
             [f"It has rained in {c} without a stop.", f"The sun shone in {c} before {day} and then it rained."], [f"{a} has an umbrella.", f"It rained in {d}."]),
            (f"{a} failed the exam, unlike {b}.", [f"{b} passed the exam.", f"{a} did not pass."],
             [f"{a} passed the exam.", f"Both passed the exam.", f"{b} failed the exam."], ["The exam was hard.", f"{a} was ill."]),
            (f"The {x} costs twice as much as the {y}.", [f"The {y} is cheaper than the {x}.", f"The {x} is dearer than the {y}."],
             [f"The {y} is dearer than the {x}.", f"Both cost the same."], [f"{a} bought the {y}.", f"The {x} is better."]),
        )
    )  # fmt: skip


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
        forms = (f"Is it true that {_lower(claim)[:-1]}?", f"According to the text: {claim}", f"Does the text say so? {claim}", claim)
        return state, yes_no(draw, draw.choice(forms), yes)
    if kind == "choice":
        claims = [draw.choice(follows), *against]
        if len(scenes) == 1:
            claims += open_[:1]
        return state, choice(draw, ("Which statement is true according to the text?", "What follows from the text?"),
                             [Option(claim) for claim in claims], 0)  # fmt: skip
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
        options = [Option("follows", "the second must be true if the first is"), Option("open", "it may or may not be true"),
                   Option("contradicts", "the second cannot be true if the first is")]  # fmt: skip
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
            return {"question": asked}, choice(draw, ("Which passage answers the question?",), [Option(t) for t in texts], 0)
        order = draw.sample(texts, len(texts))
        marks = [f"p{i + 1}" for i in range(len(order))]
        state = {"question": asked, "passages": dict(zip(marks, order, strict=True))}
        return state, choice(draw, ("Which passage answers the question?",), [Option(m) for m in marks], order.index(right))
    if kind == "noul":
        yes = draw.random() < 0.5
        passage = right if yes else draw.choice([*near, *far])
        state: Any = draw.choice(({"question": asked, "passage": passage}, f"Q: {asked}\nPassage: {passage}"))
        if draw.random() < 0.2:
            return state, yes_no(draw, "Does the passage leave the question unanswered?", not yes)
        return state, yes_no(draw, draw.choice(("Does the passage answer the question?", "Is the answer in the passage?")), yes)
    grade = draw.randrange(3)
    passage = (far[0], draw.choice(near), right)[grade]
    levels = ["has nothing to do with it", "touches it but gives no answer", "gives the answer"]
    state = {"question": asked, "passage": passage}
    return state, score(draw, ("How relevant is the passage to the question?",), levels, level(3, grade, 0.06))


def points_rule(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Points added up by a stated rule."""
    parts = draw.sample(
        (
            ("garden", "a garden"), ("balcony", "a balcony"), ("lift", "a lift"), ("garage", "a garage"), ("view", "a view"),
            ("fireplace", "a fireplace"), ("cellar_room", "a cellar"),
        ),
        draw.randint(2, 4),
    )  # fmt: skip
    has = [draw.random() < 0.5 for _ in parts]
    total = sum(has)
    rule = "A flat gets one point each for " + ", ".join(label for _, label in parts) + "."
    facts: Any = {key: "yes" if h else "no" for (key, _), h in zip(parts, has, strict=True)}
    told = [label for (_, label), h in zip(parts, has, strict=True) if h]
    if draw.random() < 0.5:
        facts = f"The flat in {grammar.fill(draw, '{street}')} has " + (" and ".join(told) if told else "none of these") + "."
    state: Any = {"flat": facts} if draw.random() < 0.5 else {"rule": rule, "flat": facts}
    levels = [str(i) for i in range(len(parts) + 1)]
    if kind == "score":
        return state, score(draw, (f"{rule} How many points?",), levels, level(len(levels), total, 0.12))
    if kind == "choice":
        return state, choice(draw, (f"{rule} How many points does it get?",), [Option(f"{i} points") for i in range(len(levels))], total)
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
    ({"walk": 0, "hike": 1, "climb": 2}, (("it rains", "It rains", "It is dry"), ("it is dark", "Night falls", "It is broad daylight"),
                                         ("the group is new", "All are beginners", "All are old hands"))),
    ({"letter": 0, "parcel": 1, "crate": 2}, (("it is fragile", "Marked fragile", "Nothing can break"),
                                             ("it goes abroad", "It goes abroad", "It stays in the country"))),
    ({"snack": 0, "meal": 1, "banquet": 2}, (("there are many guests", "Eighty guests come", "Four guests come"),
                                            ("it is a holiday", "It is a holiday", "It is an ordinary day"))),
    ({"scratch": 0, "cut": 1, "fracture": 2}, (("the patient is old", "The patient is ninety", "The patient is thirty"),
                                              ("it bleeds", "It bleeds", "No blood is seen"))),
)  # fmt: skip


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
        return state, choice(draw, ("Does the rule or its exception apply?", "Rule or exception?"), options, int(is_special))
    wrongs = [grammar.say(draw, list(normal)) for _ in range(draw.randint(0, 2))]
    rights = [grammar.say(draw, list(special)) for _ in range(draw.randint(0, 2))]
    cases = [*wrongs, *rights] or [fact]
    hits = len(rights) if wrongs or rights else int(is_special)
    draw.shuffle(cases)
    levels = list(_COUNTS[: len(cases) + 1])
    state = {"rule": rule, "cases": cases} if len(levels) > 1 else state
    return state, score(draw, ("How many of the cases fall under the exception?",), levels, level(len(levels), hits, 0.08))


_EXCEPTIONS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], bool, str, str], ...] = (
    ("Dogs must stay outside, guide dogs excepted.", ("{name} comes with a poodle.", "{name} brings a puppy on a lead."),
     ("{name}, who is blind, comes with a guide dog.", "A guide dog leads {name}."), False, "May the dog come in?", "Must the dog stay outside?"),
    ("The museum costs eight euros, children go free.", ("{name}, thirty years old, wants a ticket.", "{name} the {job} queues."),
     ("{name}, six years old, wants to go in.", "{name} is a child of four."), True, "Must the visitor pay?", "Does the visitor go in free?"),
    ("The shop is open every day but {day}.".replace("{day}", "Sunday"), ("Today is [Monday|Tuesday|Wednesday|Friday|Saturday].",),
     ("Today is Sunday.", "It is Sunday morning."), True, "Is the shop open?", "Is the shop closed?"),
    ("All guests pay in advance, members excepted.", ("{name} is no member.", "{name} is here for the first time and never joined."),
     ("{name} is a member.", "{name} joined the club in {month} and shows the member card."), True, "Must the guest pay in advance?", "May the guest pay later?"),
    ("Deliveries go out by van; fragile goods are carried by hand.", ("The box holds [books|nails|potatoes].",),
     ("The box holds [crystal glasses|old porcelain|eggs].",), True, "Does it go by van?", "Is it carried by hand?"),
    ("Nobody is let in after eight, staff excepted.", ("{name}, a visitor, comes at nine.", "At half past eight a tourist rings."),
     ("{name}, who works here, comes at nine.", "At half past eight the night nurse, a colleague, rings."), False, "Is the person let in?", "Is the person kept out?"),
)  # fmt: skip


def first_or_last(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Events in an order: which came first, was one before the other?"""
    count = draw.randint(3, 5)
    deeds = draw.sample(
        ("bought bread", "called the bank", "fed the {animal}", "washed the car", "met {name}", "read {thing}", "cooked {food}",
         "repaired the {product}", "went to the {room}", "posted a letter"), count)  # fmt: skip
    done = [grammar.fill(draw, deed) for deed in deeds]
    who = grammar.fill(draw, "{name}")
    joined = "; then ".join(done)
    told = f"{who} {joined}."
    hours = sorted(draw.sample(range(6, 22), count))
    rows = [f"{hour}:00 {deed}" for hour, deed in zip(hours, done, strict=True)]
    state = draw.choice((told, "\n".join(draw.sample(rows, count)), {"diary": draw.sample(rows, count)}))
    last = draw.random() < 0.5
    if kind == "choice":
        text = f"What came {'last' if last else 'first'}?"
        return state, choice(draw, (text,), [Option(d) for d in done], count - 1 if last else 0)
    if kind == "noul":
        i, j = draw.sample(range(count), 2)
        before = draw.random() < 0.5
        text = f"Did this: '{done[i]}' come {'before' if before else 'after'} this: '{done[j]}'?"
        return state, yes_no(draw, text, (i < j) == before)
    place = draw.randrange(count)
    names = ("first", "second", "third", "fourth", "fifth")[:count]
    return state, score(draw, (f"In which place of the order came '{done[place]}'?",), names, level(count, place, 0.1))


def newer_version(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Version numbers: is the installed one new enough?"""
    need = (draw.randint(1, 9), draw.randint(0, 20))
    shift = draw.choice((-1, 1))
    have = (max(0, need[0] + shift), draw.randint(0, 20)) if draw.random() < 0.6 else (need[0], max(0, need[1] + shift * draw.randint(0, 5)))
    enough = have >= need
    tool = draw.choice(("driver", "library", "browser", "runtime", "plug-in", "app"))
    a, b = f"{have[0]}.{have[1]}", f"{need[0]}.{need[1]}"
    state = draw.choice((f"The {tool} must have version {b} or newer. Installed: {a}.", {"needed": b, "installed": a, "what": tool}))
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
        "a date": lambda: _day(draw).strftime(draw.choice(_DATES)),
        "an amount of money": lambda: grammar.fill(draw, "{money}"),
        "a phone number": lambda: f"+{draw.randint(10, 99)} {draw.randint(100, 999)} {draw.randint(1000, 9999)}",
        "a web address": lambda: grammar.fill(draw, "https://{name}.example/[home|shop]").lower(),
        "a person's name": lambda: grammar.fill(draw, "{name} {surname}"),
        "a number plate": lambda: f"{draw.choice(letters)}{draw.choice(letters)}-{draw.randint(100, 9999)} {draw.choice(letters)}",
        "a percentage": lambda: f"{draw.randint(1, 100)} %",
    }
    names = draw.sample(sorted(good), draw.randint(3, 6))
    right = names[0]
    value = good[right]()
    state = draw.choice((value, {"value": value}, f"Value: {value}"))
    if kind == "choice":
        return state, choice(draw, ("What kind of value is this?", "What does the string stand for?"), [Option(n) for n in names], 0)
    if kind == "noul":
        yes = draw.random() < 0.5
        return state, yes_no(draw, f"Is this {right if yes else names[1]}?", yes)
    total = draw.randint(2, 4)
    hits = draw.randint(0, total)
    values = [good[right]() for _ in range(hits)] + [good[draw.choice(names[1:])]() for _ in range(total - hits)]
    draw.shuffle(values)
    levels = list(_COUNTS[: total + 1])
    return {"values": values}, score(draw, (f"How many of the values are {right}?",), levels, level(total + 1, hits, 0.06))


def open_now(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Opening hours by weekday, and a moment."""
    days = grammar.words()["day"]
    opens, closes = draw.randint(6, 11), draw.randint(15, 22)
    shut = draw.choice(days)
    place = draw.choice(("bakery", "library", "pool", "pharmacy", "museum", "workshop", "town hall"))
    want = draw.random() < 0.5
    if want:
        day, hour = draw.choice([d for d in days if d != shut]), draw.randrange(opens, closes)
    elif draw.random() < 0.4:
        day, hour = shut, draw.randrange(opens, closes)
    else:
        day, hour = draw.choice([d for d in days if d != shut]), draw.choice([*range(0, opens), *range(closes, 24)])
    half = draw.choice(("00", "30"))
    state = draw.choice(
        (
            f"The {place} is open from {opens}:00 to {closes}:00, closed on {shut}. Now it is {day}, {hour}:{half}.",
            {"place": place, "opens": f"{opens}:00", "closes": f"{closes}:00", "closed_on": shut, "now": f"{day} {hour}:{half}"},
        )
    )
    if kind == "noul":
        if draw.random() < 0.4:
            return state, yes_no(draw, f"Is the {place} closed now?", not want)
        return state, yes_no(draw, f"Is the {place} open now?", want)
    if kind == "choice":
        options = [Option("go_now", "it is open"), Option("come_later", "it is closed")]
        return state, choice(draw, ("What should the visitor do?", "Advise the visitor."), options, int(not want))
    left = closes - hour if want else 0
    grade = 0 if not want else 1 if left <= 2 else 2
    levels = ["closed", "closes within two hours", "open for longer than two hours"]
    return state, score(draw, ("How long is it still open?",), levels, level(3, grade, 0.08))


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
