"""Families about numbers: a stated limit and a value, or a table of steps and a value."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mini.families import grammar
from mini.families.questions import Answer, Option, choice, level, score, yes_no
from mini.items import Item, Kind


@dataclass(frozen=True, slots=True)
class Limit:
    """A rule of the form "at most" or "at least" about one number.

    `rules` state it with `{limit}`, `facts` tell the value with `{value}`; `yes` is what may happen when it holds.
    """

    name: str
    at_most: bool
    low: int
    high: int
    field: str
    unit: str
    rules: tuple[str, ...]
    facts: tuple[str, ...]
    asks: tuple[str, ...]
    met: Option
    broken: Option
    step: int = 1

    def make(self, draw: random.Random, kind: Kind) -> Item:
        limit = draw.randrange(self.low, self.high + 1, self.step)
        met = draw.random() < 0.5
        reach = draw.choice((0.1, 0.3, 1.0))  # near misses are the hard ones
        most = max(self.step, round((self.high - self.low) * reach / self.step) * self.step)
        gap = draw.randrange(0 if met else self.step, most + self.step, self.step)
        inside = -1 if self.at_most else 1
        value = limit + (inside if met else -inside) * gap
        if value < 0:
            value = 0
        holds = value <= limit if self.at_most else value >= limit
        rule = grammar.say(draw, list(self.rules)).replace(
            "<limit>", f"{limit:,}" if draw.random() < 0.2 else str(limit)
        )
        fact = grammar.say(draw, list(self.facts)).replace("<value>", str(value))
        return Item(
            self.name, self._state(draw, rule, fact, limit, value), *self._answer(draw, kind, holds, limit, value)
        )

    def _state(self, draw: random.Random, rule: str, fact: str, limit: int, value: int) -> Any:
        side = "max" if self.at_most else "min"
        return draw.choice(
            (
                f"{rule} {fact}",
                f"{fact} {rule}",
                f"Rule: {rule}\nCase: {fact}",
                {"rule": rule, "case": fact},
                {f"{side}_{self.field}": limit, self.field: value, "unit": self.unit},
                {"policy": rule, self.field: value},
                {
                    "policy": {f"{side}_{self.field}": limit},
                    "request": {self.field: value, "by": grammar.fill(draw, "{name}")},
                },
            )
        )

    def _answer(self, draw: random.Random, kind: Kind, holds: bool, limit: int, value: int) -> Answer:
        if kind == "noul":
            if draw.random() < 0.3:
                word = "exceed" if self.at_most else "miss"
                text = draw.choice(
                    (f"Does the {self.field.replace('_', ' ')} {word} the limit?", "Is the rule broken?")
                )
                return yes_no(draw, text, not holds)
            sides = (self.met.meaning, self.broken.meaning)
            return yes_no(draw, draw.choice((*self.asks, "Is the rule respected?")), holds, sides)
        if kind == "choice":
            asks = ("What follows from the rule?", "What should happen?", "Decide the case.", "Apply the rule.")
            if draw.random() < 0.3:
                names = [Option("below the limit"), Option("exactly the limit"), Option("above the limit")]
                place = (value > limit) - (value < limit) + 1
                return choice(draw, ("Where does the value lie?", "Compare the value with the limit."), names, place)
            return choice(draw, asks, [self.met, self.broken], int(not holds))
        far = max(1, round(limit * 0.25))
        edges = (value < limit - far, value < limit, value <= limit, value <= limit + far)
        place = (0, 1, 2, 3)[edges.index(True)] if any(edges) else 4
        levels = ["far below the limit", "somewhat below", "exactly the limit", "somewhat above", "far above the limit"]
        return score(
            draw,
            ("Where does the value lie compared with the limit?", "How high is the value?"),
            levels,
            level(5, place, 0.08),
        )


def _limit(
    name: str,
    side: str,
    span: tuple[int, int, int],
    field: str,
    unit: str,
    rules: Sequence[str],
    facts: Sequence[str],
    asks: Sequence[str],
    met: tuple[str, str],
    broken: tuple[str, str],
) -> Limit:
    return Limit(
        name,
        side == "most",
        span[0],
        span[1],
        field,
        unit,
        tuple(rules),
        tuple(facts),
        tuple(asks),
        Option(*met),
        Option(*broken),
        span[2],
    )


LIMITS = (
    _limit(
        "age_rule",
        "least",
        (6, 70, 1),
        "age",
        "years",
        ["[Visitors|Applicants|Members] must be at least <limit> years old.", "Nobody under <limit> may take part."],
        [
            "{name} is <value>.",
            "{name} {surname}, <value>, [applies|wants to come in].",
            "{name} turned <value> last {month}.",
        ],
        ["Is the person old enough?", "May the person take part?"],
        ("admit", "The person may take part."),
        ("turn_away", "The person is too young."),
    ),
    _limit(
        "budget_cap",
        "most",
        (50, 5000, 50),
        "cost",
        "dollars",
        [
            "[Spending|Purchases] of up to $<limit> need no approval.",
            "The budget for this is $<limit> and must not be passed.",
        ],
        ["{name} wants to buy a {product} for $<value>.", "The offer of {company} comes to $<value>."],
        ["Is it within the budget?", "Can it be bought without more approval?"],
        ("buy", "It may be bought."),
        ("ask_first", "It costs too much."),
    ),
    _limit(
        "luggage_weight",
        "most",
        (5, 40, 1),
        "weight_kg",
        "kg",
        ["A bag may weigh <limit> kg at most.", "Bags heavier than <limit> kg stay on the ground."],
        ["The bag of {name} weighs <value> kg.", "The scales show <value> kg for {name}'s {colour} suitcase."],
        ["Is the bag light enough?", "May the bag fly?"],
        ("accept_bag", "The bag may fly."),
        ("reject_bag", "The bag is too heavy."),
    ),
    _limit(
        "sensor_alarm",
        "most",
        (10, 500, 5),
        "reading",
        "units",
        ["The alarm rings when the [pressure|temperature|load] passes <limit>.", "Readings up to <limit> are normal."],
        ["The sensor in the {room} reads <value>.", "Reading at {time}: <value>."],
        ["Is the reading normal?", "Does the alarm stay silent?"],
        ("all_normal", "The reading is normal."),
        ("raise_alarm", "The reading is too high."),
    ),
    _limit(
        "stock_level",
        "least",
        (5, 300, 5),
        "stock",
        "pieces",
        ["Order more when fewer than <limit> pieces are left.", "The shelf needs at least <limit> pieces."],
        ["<value> {product}s are on the shelf.", "The count of {day} found <value> pieces."],
        ["Is there enough in stock?", "Can we wait with the next order?"],
        ("wait_with_order", "There is enough in stock."),
        ("reorder", "The stock is too low."),
    ),
    _limit(
        "pass_mark",
        "least",
        (30, 90, 1),
        "points",
        "points",
        ["<limit> points are needed to pass.", "Whoever has fewer than <limit> points fails."],
        ["{name} reached <value> points.", "Result of {name} {surname}: <value> points."],
        ["Did the candidate pass?", "Is the exam passed?"],
        ("passed", "The exam is passed."),
        ("failed", "The exam is not passed."),
    ),
    _limit(
        "free_shipping",
        "least",
        (20, 200, 5),
        "basket",
        "euros",
        [
            "Orders from <limit> euros are shipped free.",
            "Shipping costs nothing if the basket holds <limit> euros or more.",
        ],
        ["{name}'s basket comes to <value> euros.", "The {product} and the {product} cost <value> euros together."],
        ["Is shipping free?", "Does the order reach the amount for free shipping?"],
        ("free", "Shipping is free."),
        ("pay_shipping", "Shipping must be paid."),
    ),
    _limit(
        "guest_number",
        "most",
        (4, 200, 2),
        "guests",
        "people",
        ["The {room} holds <limit> people at most.", "No more than <limit> guests are allowed."],
        ["<value> people have said they will come.", "{name} invited guests: <value> in all."],
        ["Do all the guests fit in?", "Is the number of guests allowed?"],
        ("enough_room", "All guests fit in."),
        ("too_many", "There are too many guests."),
    ),
    _limit(
        "driving_speed",
        "most",
        (20, 130, 10),
        "speed",
        "km/h",
        ["The speed limit on {street} is <limit>.", "Here one may drive <limit> at most."],
        ["{name} drove <value>.", "The camera measured <value> at {time}."],
        ["Did the driver keep to the limit?", "Was the speed allowed?"],
        ("no_fine", "The speed was allowed."),
        ("fine", "The driver was too fast."),
    ),
    _limit(
        "upload_size",
        "most",
        (5, 500, 5),
        "size_mb",
        "MB",
        ["Files of up to <limit> MB can be uploaded.", "The upload refuses files above <limit> MB."],
        ["{thing} is <value> MB large.", "{name} tries to upload a film of <value> MB."],
        ["Can the file be uploaded?", "Is the file small enough?"],
        ("upload", "The file can be uploaded."),
        ("refuse_file", "The file is too large."),
    ),
    _limit(
        "work_years",
        "least",
        (1, 15, 1),
        "years_of_practice",
        "years",
        [
            "The post asks for <limit> years of practice or more.",
            "Only people with at least <limit> years as a {job} are invited.",
        ],
        ["{name} has worked as a {job} for <value> years.", "{name}'s letter shows <value> years at {company}."],
        ["Does the candidate have enough practice?", "Should the candidate be invited?"],
        ("invite", "The candidate has enough practice."),
        ("decline", "The candidate has too little practice."),
    ),
    _limit(
        "overtime_cap",
        "most",
        (2, 20, 1),
        "overtime_hours",
        "hours",
        ["Nobody may work more than <limit> extra hours a week.", "Overtime is capped at <limit> hours."],
        ["{name} noted <value> extra hours this week.", "The sheet of {name} shows <value> hours of overtime."],
        ["Is the overtime allowed?", "Did the person stay within the cap?"],
        ("within_cap", "The overtime is allowed."),
        ("over_cap", "That is too much overtime."),
    ),
)

HELD_OUT_LIMITS = (
    _limit(
        "password_length",
        "least",
        (6, 20, 1),
        "characters",
        "characters",
        ["A password has at least <limit> characters.", "Passwords shorter than <limit> characters are rejected."],
        ["{name} chose a password of <value> characters.", "The new password counts <value> characters."],
        ["Is the password long enough?", "Will the password be accepted?"],
        ("take_it", "The password is long enough."),
        ("reject_it", "The password is too short."),
    ),
    _limit(
        "bridge_load",
        "most",
        (2, 60, 1),
        "tonnes",
        "tonnes",
        ["The bridge carries <limit> tonnes at most.", "Lorries above <limit> tonnes must not cross."],
        ["The lorry of {company} weighs <value> tonnes.", "{name} drives a truck of <value> tonnes."],
        ["May the lorry cross?", "Is the lorry light enough for the bridge?"],
        ("cross", "The lorry may cross."),
        ("turn_back", "The lorry is too heavy."),
    ),
)


@dataclass(frozen=True, slots=True)
class Ladder:
    """A table of steps: a value belongs to the highest step whose bound it reaches."""

    name: str
    field: str
    steps: tuple[str, ...]
    unit: str
    top: int
    facts: tuple[str, ...]
    ask: str

    def make(self, draw: random.Random, kind: Kind) -> Item:
        count = draw.randint(2, len(self.steps))
        names = list(self.steps[:count])
        unit = max(1, self.top // 40)
        bounds = [0, *(unit * b for b in sorted(draw.sample(range(1, 40), count - 1)))]
        place = draw.randrange(count)
        last = bounds[place + 1] - 1 if place + 1 < count else self.top + unit
        value = draw.randint(bounds[place], max(bounds[place], last))
        rows = [f"{name}: from {bound} {self.unit}" for name, bound in zip(names, bounds, strict=True)]
        fact = grammar.say(draw, list(self.facts)).replace("<value>", str(value))
        table: Any = dict(zip(names, bounds, strict=True))
        state = draw.choice(
            (
                "; ".join(rows) + f". {fact}",
                "\n".join(rows) + f"\n\n{fact}",
                {"table": rows, "case": fact},
                {"lowest_value_of_each": table, self.field: value},
            )
        )
        ask = f"Which {self.ask} applies?"
        if kind == "choice":
            return Item(
                self.name, state, *choice(draw, (ask, f"Find the {self.ask}."), [Option(n) for n in names], place)
            )
        if kind == "score":
            return Item(
                self.name,
                state,
                *score(draw, (ask, f"Read the {self.ask} off the table."), names, level(count, place, 0.06)),
            )
        yes = draw.random() < 0.5
        asked = place if yes else draw.choice([i for i in range(count) if i != place])
        text = draw.choice((f"Is the {self.ask} '{names[asked]}'?", f"Does '{names[asked]}' apply here?"))
        return Item(self.name, state, *yes_no(draw, text, yes))


LADDERS = (
    Ladder(
        "discount_step",
        "order_value",
        ("no discount", "bronze", "silver", "gold", "platinum"),
        "euros",
        2000,
        ("{name} orders for <value> euros.", "Value of the order: <value> euros."),
        "discount class",
    ),
    Ladder(
        "school_grade",
        "points",
        ("F", "E", "D", "C", "B", "A"),
        "points",
        100,
        ("{name} has <value> points.", "The paper of {name} got <value> points."),
        "grade",
    ),
    Ladder(
        "wind_force",
        "wind",
        ("calm", "breeze", "strong wind", "gale", "hurricane"),
        "km/h",
        160,
        ("The wind blows at <value> km/h in {city}.", "Gusts of <value> km/h were measured."),
        "wind class",
    ),
    Ladder(
        "member_status",
        "nights",
        ("guest", "friend", "regular", "patron"),
        "nights",
        80,
        ("{name} stayed <value> nights this year.", "<value> nights are on {name}'s account."),
        "member status",
    ),
    Ladder(
        "reply_time",
        "minutes",
        ("on time", "slow", "late", "very late"),
        "minutes",
        240,
        ("The first answer came after <value> minutes.", "{name} waited <value> minutes."),
        "class of reply time",
    ),
    Ladder(
        "air_quality",
        "index",
        ("good", "moderate", "poor", "bad", "hazardous"),
        "index points",
        400,
        ("The index in {city} is <value> today.", "Station {code} reports <value>."),
        "air class",
    ),
    Ladder(
        "parking_fee",
        "minutes_parked",
        ("free", "short stay", "half day", "full day"),
        "minutes",
        600,
        ("The {colour} car stood there for <value> minutes.", "{name} parked for <value> minutes."),
        "parking fee",
    ),
)

HELD_OUT_LADDERS = (
    Ladder(
        "parcel_class",
        "grams",
        ("letter", "small parcel", "parcel", "heavy parcel", "freight"),
        "grams",
        8000,
        ("The {product} with its box weighs <value> grams.", "Weight on the scales: <value> grams."),
        "postage class",
    ),
)
