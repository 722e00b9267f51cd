"""Families about looking things up: a record, a directory, a table, a list."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mini.families import grammar
from mini.families.questions import Answer, Option, choice, level, score, yes_no
from mini.items import Item, Kind

_COUNTS = ("none", "one", "two", "three", "four", "five", "six", "seven")


@dataclass(frozen=True, slots=True)
class Directory:
    """Keys that belong to owners, told as a record, as lines or as sentences; one key is asked about.

    `keys` and `owners` are word lists by slot name or words of their own.
    """

    name: str
    keys: str | tuple[str, ...]
    owners: str | tuple[str, ...]
    key_noun: str
    owner_noun: str
    sentence: str
    """With `<key>` and `<owner>`."""

    def make(self, draw: random.Random, kind: Kind) -> Item:
        keys = _drawn(draw, self.keys, draw.randint(2, 7))
        owners = _drawn(draw, self.owners, draw.randint(2, 5))
        table = {key: draw.choice(owners) for key in keys}
        key = draw.choice(keys)
        hidden = draw.random() < 0.35  # the key itself stands in the state, in a second place
        state = self._state(draw, table, key if hidden else None)
        asked = "the request" if hidden else key
        what = f"{self.owner_noun} of {asked}" if not hidden else f"{self.owner_noun} for `{_case(self.key_noun)}`"
        return Item(self.name, state, *self._answer(draw, kind, table, key, owners, what))

    def _answer(
        self, draw: random.Random, kind: Kind, table: dict[str, str], key: str, owners: Sequence[str], what: str
    ) -> Answer:
        if kind == "choice":
            asks = (f"What is the {what}?", f"Look up the {what}.", f"Find the {what} in the state.")
            if draw.random() < 0.2:
                mine = [k for k in table if table[k] == table[key]]
                others = [k for k in table if table[k] != table[key]]
                if others:
                    text = f"Which {self.key_noun} goes with the {self.owner_noun} {table[key]}?"
                    return choice(draw, (text,), [Option(mine[0]), *(Option(other) for other in others[:5])], 0)
            return choice(draw, asks, [Option(owner) for owner in owners], list(owners).index(table[key]))
        if kind == "noul":
            yes = draw.random() < 0.5
            owner = table[key] if yes else draw.choice([o for o in owners if o != table[key]])
            if draw.random() < 0.2:
                return yes_no(draw, f"Is the {what} someone or something other than {owner}?", not yes)
            return yes_no(draw, draw.choice((f"Is the {what} {owner}?", f"Is {owner} the {what}?")), yes)
        owner = draw.choice(list(owners))
        hits = sum(value == owner for value in table.values())
        text = f"How many entries have {owner} as {self.owner_noun}?"
        levels = list(_COUNTS[: len(table) + 1])
        return score(draw, (text,), levels, level(len(levels), hits, 0.06))

    def _state(self, draw: random.Random, table: dict[str, str], key: str | None) -> Any:
        told = [self.sentence.replace("<key>", k).replace("<owner>", o) for k, o in table.items()]
        case = _case(self.key_noun)
        roll = draw.randrange(5)
        if roll == 0:
            text = " ".join(told)
            return text if key is None else f"{text}\n{case}: {key}"
        if roll == 1:
            text = "\n".join(f"{k}: {o}" for k, o in table.items())
            return text if key is None else f"{case} = {key}\n\n{text}"
        if roll == 2:
            rows = [{_case(self.key_noun) + "_name": k, self.owner_noun.replace(" ", "_"): o} for k, o in table.items()]
            return {"rows": rows} if key is None else {case: key, "rows": rows}
        record: dict[str, Any] = {"directory": table} if roll == 3 or key is not None else dict(table)
        if key is not None:
            record = {case: key, "by": grammar.fill(draw, "{name}"), **record}
            if draw.random() < 0.5:
                record = dict(reversed(record.items()))
        return record


def _case(noun: str) -> str:
    return noun.replace(" ", "_")


def _drawn(draw: random.Random, source: str | tuple[str, ...], count: int) -> list[str]:
    words = grammar.words()[source] if isinstance(source, str) else list(source)
    return draw.sample(words, min(count, len(words)))


_SYSTEMS = (
    "mailer",
    "web-shop",
    "ledger",
    "crawler",
    "scheduler",
    "archive",
    "proxy",
    "router",
    "translator",
    "scanner",
    "uploader",
    "indexer",
    "reporter",
    "gateway-eu",
    "gateway-us",
    "kiosk",
    "planner",
    "renderer",
)
_CREWS = ("team Oak", "team Birch", "team Cedar", "team Maple", "team Willow", "team Pine")
_STATES = ("open", "closed", "waiting", "approved", "rejected", "archived")
_SHIFTS = ("early shift", "late shift", "night shift", "day off", "on call")
_PLACES = ("shelf A", "shelf B", "shelf C", "cold room", "yard", "counter")
_GROUPS = ("reader", "writer", "owner", "guest", "auditor")

DIRECTORIES = (
    Directory("who_runs_what", _SYSTEMS, _CREWS, "system", "crew", "<key> is run by <owner>."),
    Directory("who_lives_where", "name", "city", "person", "home town", "<key> lives in <owner>."),
    Directory("who_does_what", "name", "job", "person", "profession", "<key> works as a <owner>."),
    Directory("file_state", "code", _STATES, "file", "status", "File <key> is <owner>."),
    Directory("price_list", "product", "money", "article", "price", "The <key> costs <owner>."),
    Directory("shift_plan", "name", _SHIFTS, "employee", "shift", "<key> has the <owner>."),
    Directory("where_it_lies", "product", _PLACES, "article", "place", "The <key> lies in the <owner>."),
    Directory("colour_of_thing", "product", "colour", "object", "colour", "The <key> is <owner>."),
    Directory("meeting_times", "name", "time", "visitor", "time", "<key> comes at <owner>."),
    Directory("user_group", "name", _GROUPS, "user", "group", "<key> is in the group <owner>."),
)
HELD_OUT_DIRECTORIES = (
    Directory(
        "lent_books",
        ("Emma", "Ulysses", "Dracula", "Walden", "Candide", "Middlemarch", "Ivanhoe", "Faust"),
        "name",
        "book",
        "borrower",
        "<key> was lent to <owner>.",
    ),
    Directory(
        "duty_doctor",
        "day",
        ("Dr. Reyes", "Dr. Abbott", "Dr. Chowdhury", "Dr. Lund", "Dr. Sato"),
        "weekday",
        "doctor on duty",
        "On <key> <owner> is on duty.",
    ),
)


def two_steps(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """A person's team and a team's room: the room of a person takes two look-ups."""
    people, crews = grammar.pick(draw, "name", draw.randint(2, 5)), draw.sample(_CREWS, draw.randint(2, 4))
    rooms = draw.sample(range(100, 400), len(crews))
    team = {person: draw.choice(crews) for person in people}
    room = dict(zip(crews, (f"room {number}" for number in rooms), strict=True))
    person = draw.choice(people)
    lines = [f"{p} is in {c}." for p, c in team.items()] + [f"{c} sits in {r}." for c, r in room.items()]
    state = draw.choice(({"teams": team, "rooms": room}, {"rooms": room, "teams": team}, " ".join(lines)))
    right = room[team[person]]
    names = list(room.values())
    if kind == "choice":
        return state, choice(
            draw, (f"In which room does {person} sit?",), [Option(n) for n in names], names.index(right)
        )
    if kind == "noul":
        yes = draw.random() < 0.5
        asked = right if yes else draw.choice([name for name in names if name != right])
        return state, yes_no(draw, f"Does {person} sit in {asked}?", yes)
    asked = draw.choice(names)
    hits = sum(room[c] == asked for c in team.values())
    levels = list(_COUNTS[: len(people) + 1])
    return state, score(draw, (f"How many people sit in {asked}?",), levels, level(len(levels), hits, 0.1))


def order_record(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """A record with several fields; one of them is asked about."""
    say = grammar.fill
    record: dict[str, Any] = {
        "order": say(draw, "{code}"),
        "customer": say(draw, "{name} {surname}"),
        "city": say(draw, "{city}"),
        "article": say(draw, "{product}"),
        "colour": say(draw, "{colour}"),
        "quantity": draw.randint(1, 6),
        "paid": draw.random() < 0.5,
        "gift_wrap": draw.random() < 0.5,
        "status": draw.choice(_STATES),
        "delivery_day": say(draw, "{day}"),
    }
    slots = {"city": "city", "article": "product", "colour": "colour", "delivery_day": "day"}
    kept = draw.sample(sorted(record), draw.randint(5, 10))
    field = draw.choice([name for name in slots if name in kept] or ["city"])
    kept = list(dict.fromkeys([*kept, field, "quantity", "paid"]))
    draw.shuffle(kept)
    shown = {name: record[name] for name in kept}
    state: Any = shown if draw.random() < 0.7 else "\n".join(f"{k.replace('_', ' ')}: {v}" for k, v in shown.items())
    name = field.replace("_", " ")
    if kind == "choice":
        wrong = [w for w in grammar.pick(draw, slots[field], draw.randint(2, 6)) if w != record[field]]
        return state, choice(
            draw,
            (f"What is the {name} of the order?", f"Read the {name}."),
            [Option(record[field]), *(Option(w) for w in wrong)],
            0,
        )
    if kind == "score":
        levels = ["one piece", "two pieces", "three pieces", "four pieces", "five pieces", "six pieces"]
        return state, score(draw, ("How many pieces are ordered?",), levels, level(6, record["quantity"] - 1, 0.06))
    if draw.random() < 0.5:
        text = draw.choice(("Is the order paid?", "Has the customer paid?"))
        return state, yes_no(draw, text, record["paid"])
    yes = draw.random() < 0.5
    other = draw.choice([w for w in grammar.words()[slots[field]] if w != record[field]])
    return state, yes_no(draw, f"Is the {name} {record[field] if yes else other}?", yes)


def rights_table(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """What each role may do."""
    roles = draw.sample(("viewer", "editor", "manager", "guest", "auditor", "moderator"), draw.randint(2, 4))
    deeds = draw.sample(("read", "write", "delete", "invite", "export", "approve", "print"), draw.randint(3, 5))
    rights = {role: sorted(draw.sample(deeds, draw.randint(1, len(deeds) - 1))) for role in roles}
    role = draw.choice(roles)
    person = grammar.fill(draw, "{name}")
    lines = " ".join(f"A {r} may {', '.join(rights[r])}." for r in roles)
    state: Any = draw.choice(
        ({"roles": rights, "user": {"name": person, "role": role}}, f"{lines} {person} is a {role}.")
    )
    if kind == "noul":
        yes = draw.random() < 0.5
        deed = draw.choice(rights[role]) if yes else draw.choice([d for d in deeds if d not in rights[role]])
        text = draw.choice(
            (f"May {person} {deed}?", f"Is {person} allowed to {deed}?", f"Does {person}'s role cover '{deed}'?")
        )
        if draw.random() < 0.2:
            return state, yes_no(draw, f"Must '{deed}' be refused to {person}?", not yes)
        return state, yes_no(draw, text, yes)
    if kind == "choice":
        right = draw.choice(rights[role])
        wrong = [d for d in deeds if d not in rights[role]]
        return state, choice(
            draw,
            (f"What may {person} do?", f"Which action is open to {person}?"),
            [Option(right), *(Option(d) for d in wrong)],
            0,
        )
    levels = list(_COUNTS[: len(deeds) + 1])
    return state, score(
        draw, (f"How many different actions may {person} take?",), levels, level(len(levels), len(rights[role]), 0.08)
    )


def on_the_list(draw: random.Random, kind: Kind) -> tuple[Any, Answer]:
    """Whether something is on a list of allowed or forbidden things."""
    slot = draw.choice(("city", "name", "product", "food", "company", "country"))
    words = grammar.pick(draw, slot, 10)
    listed, others = words[: draw.randint(2, 6)], words[6:]
    banned = draw.random() < 0.4
    head = (
        draw.choice(("Not allowed", "Blocked", "Banned"))
        if banned
        else draw.choice(("Allowed", "Approved", "Accepted"))
    )
    state: Any = draw.choice((f"{head}: {', '.join(listed)}.", {head.lower().replace(" ", "_"): listed}))
    inside = draw.random() < 0.5
    asked = draw.choice(listed if inside else others)
    if kind == "noul":
        if draw.random() < 0.5:
            return state, yes_no(
                draw, draw.choice((f"Is {asked} on the list?", f"Does the list name {asked}?")), inside
            )
        text = f"Only the list counts: is {asked} {'forbidden' if banned else 'permitted'}?"
        return state, yes_no(draw, text, inside)
    if kind == "choice":
        right, wrong = (listed, others) if inside else (others, listed)
        text = "Which of these is on the list?" if inside else "Which of these is missing from the list?"
        return state, choice(draw, (text,), [Option(draw.choice(right)), *(Option(w) for w in wrong[:4])], 0)
    mixed = [*draw.sample(listed, k := draw.randint(0, min(3, len(listed)))), *others[: 3 - k]]
    draw.shuffle(mixed)
    state = {"list": listed, "wanted": mixed}
    levels = list(_COUNTS[: len(mixed) + 1])
    return state, score(draw, ("How many of the wanted things are on the list?",), levels, level(len(levels), k, 0.06))
