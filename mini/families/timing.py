"""Families about dates, hours and order in time."""

import datetime
import random
from typing import Any

from mini.families import grammar
from mini.families.questions import Answer, Option, choice, level, score, yes_no
from mini.items import Kind

DATES = ("%Y-%m-%d", "%d %B %Y", "%B %d, %Y", "%d.%m.%Y")


def day_drawn(draw: random.Random) -> datetime.date:
    """A day of two years."""
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
    rule = draw.choice(
        ("We take articles back up to {w} days after the sale{c}.", "Articles may come back within {w} days{c}.")
    )
    rule = rule.format(w=window, c=f", {demand} only" if conditional else "")
    when = f"{days} days" if days % 7 or draw.random() < 0.5 or days == 0 else f"{days // 7} weeks"
    case = grammar.fill(
        draw, f"{{name}} bought the {{product}} {when} ago" + (f", {flaw if spoiled else fine}" if conditional else "")
    )
    state = draw.choice((f"{rule} {case}.", {"rule": rule, "case": case}, f"Case: {case}.\nShop rule: {rule}"))
    if kind == "noul":
        asks = (
            "Does the shop take it back?",
            "Is the article returned in time and in order?",
            "Should the return be accepted?",
        )
        if draw.random() < 0.2:
            return state, yes_no(draw, "Must the return be refused?", verdict == 1)
        return state, yes_no(draw, draw.choice(asks), verdict == 0)
    if kind == "choice":
        options = [Option("accept", "in time and in order"), Option("too_late", "the days are over")]
        if conditional:
            options.append(Option("bad_condition", f"in time, but {flaw}"))
        return state, choice(
            draw, ("Decide on the return.", "What is the result?"), options, 2 if spoiled else int(late)
        )
    place = 0 if days <= window // 2 else 1 if days <= window else 2 if days <= 2 * window else 3
    levels = ["well within the days", "within the days", "over the days", "more than twice the days"]
    return state, score(
        draw, ("How late is the return?", "How much of the time was used?"), levels, level(4, place, 0.1)
    )


def deadline(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Whether a date comes before or after a deadline."""
    due, form = day_drawn(draw), draw.choice(DATES)
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
        options = [
            Option("early", "before the last day"),
            Option("just_in_time", "on the last day"),
            Option("late", "after the last day"),
        ]
        return state, choice(draw, ("When was it handed in?",), options, (gap > 0) - (gap < 0) + 1)
    place = 0 if gap <= 0 else 1 if gap <= 7 else 2 if gap <= 31 else 3
    levels = ["not late", "late by a week at most", "late by a month at most", "later than that"]
    return state, score(draw, ("How late was it?",), levels, level(4, place, 0.1))


def expiry(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Whether something is still valid today."""
    today, form = day_drawn(draw), draw.choice(DATES)
    left = draw.choice((-400, -90, -20, -3, 0, 3, 20, 90, 400)) + draw.randint(-1, 1)
    end = today + datetime.timedelta(days=left)
    what = draw.choice(
        ("passport", "licence", "ticket", "voucher", "certificate", "medicine", "milk", "contract", "visa")
    )
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
            {
                "planned": {"day": first, "from": a, "to": a + length},
                "asked_for": {"day": second, "from": b, "to": b + 1},
            },
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
    return state, score(
        draw,
        ("How much of the planned time would be taken?",),
        ["nothing", "a part", "all of it"],
        level(3, place, 0.08),
    )


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
            {
                "place": place,
                "opens": f"{opens}:00",
                "closes": f"{closes}:00",
                "closed_on": shut,
                "now": f"{day} {hour}:{half}",
            },
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


def first_or_last(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Events in an order: which came first, was one before the other?"""
    count = draw.randint(3, 5)
    deeds = draw.sample(
        (
            "bought bread",
            "called the bank",
            "fed the {animal}",
            "washed the car",
            "met {name}",
            "read {thing}",
            "cooked {food}",
            "repaired the {product}",
            "went to the {room}",
            "posted a letter",
        ),
        count,
    )
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
