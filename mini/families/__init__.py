"""Generated families of situations; each answers a choice, a yes/no and a score question.

`TRAINED` are learnt from, `HELD_OUT` never are: they measure what carries over to situations the model has not seen.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from mini.families import banks, comparisons, limits, policies, records, statements, timing
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
    timing.return_window,
    timing.deadline,
    comparisons.which_is_more,
    timing.meeting_overlap,
    policies.both_conditions,
    policies.house_rules,
    statements.does_it_say,
    statements.how_they_relate,
    statements.answers_the_question,
    policies.points_rule,
    policies.steps_rule,
    policies.exception_rule,
    timing.first_or_last,
    comparisons.newer_version,
    comparisons.format_check,
    statements.same_meaning,
)
_HELD_OUT_RULES: tuple[Rule, ...] = (timing.expiry, timing.open_now)


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
    name = rule.__name__

    def make(draw: random.Random, kind: Kind) -> Item:
        state, answer = rule(draw, kind)
        return Item(name, state, *answer)

    return Family(name, make)
