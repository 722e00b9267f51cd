"""Generated families of situations; each answers a choice, a yes/no and a score question.

`TRAINED` are learnt from, `HELD_OUT` never are: they measure what carries over to situations the model has not seen.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from mini.families import banks, limits, reasoning, records
from mini.families.grammar import BANKS
from mini.families.questions import Answer
from mini.items import Item, Kind

Rule = Callable[[random.Random, Kind], tuple[Any, Answer]]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of situation. `make` draws an item of the asked type."""

    name: str
    make: Callable[[random.Random, Kind], Item]


_RULES: tuple[Rule, ...] = (
    records.two_steps,
    records.order_record,
    records.rights_table,
    records.on_the_list,
    reasoning.return_window,
    reasoning.deadline,
    reasoning.which_is_more,
    reasoning.meeting_overlap,
    reasoning.both_conditions,
    reasoning.house_rules,
    reasoning.does_it_say,
    reasoning.how_they_relate,
    reasoning.answers_the_question,
    reasoning.points_rule,
    reasoning.steps_rule,
    reasoning.exception_rule,
    reasoning.first_or_last,
    reasoning.newer_version,
    reasoning.format_check,
    reasoning.same_meaning,
)
_HELD_OUT_RULES: tuple[Rule, ...] = (reasoning.expiry, reasoning.open_now)


@cache
def trained() -> dict[str, Family]:
    """The families that training sees, by name."""
    topics = [topic for part in "abc" for topic in banks.read_topics(BANKS / f"topics_{part}.txt")]
    told = [*topics, *banks.read_signals(BANKS / "signals.txt"), *banks.read_scales(BANKS / "scales.txt")]
    return _named([*told, *limits.LIMITS, *limits.LADDERS, *records.DIRECTORIES], _RULES)


@cache
def held_out() -> dict[str, Family]:
    """The families that training never sees, by name."""
    told = [
        *banks.read_topics(BANKS / "topics_heldout.txt"),
        *banks.read_signals(BANKS / "signals_heldout.txt"),
        *banks.read_scales(BANKS / "scales_heldout.txt"),
    ]
    numbers = [*limits.HELD_OUT_LIMITS, *limits.HELD_OUT_LADDERS, *records.HELD_OUT_DIRECTORIES]
    return _named([*told, *numbers], _HELD_OUT_RULES)


def _named(told: list[Any], rules: tuple[Rule, ...]) -> dict[str, Family]:
    families = [Family(one.name, one.make) for one in told] + [_ruled(rule) for rule in rules]
    named = {family.name: family for family in families}
    assert len(named) == len(families), "two families of one name"
    return named


def _ruled(rule: Rule) -> Family:
    name = rule.__name__  # type: ignore[attr-defined]

    def make(draw: random.Random, kind: Kind) -> Item:
        state, answer = rule(draw, kind)
        return Item(name, state, *answer)

    return Family(name, make)
