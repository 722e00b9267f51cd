"""What the generated families promise: all three types, balance, determinism, and a split that nothing crosses."""

import json
import random
from collections.abc import Iterator

import pytest

import wire
from mini import families
from mini.data import FIT, fit_families, generated, trained_families
from mini.families import Family, grammar
from mini.items import KINDS, Item

FAMILIES = {**families.trained(), **families.held_out()}
MANY = 120


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def drawn(family: Family, count: int = MANY) -> Iterator[Item]:
    for kind in KINDS:
        draw = random.Random(f"{family.name} {kind}")
        for _ in range(count):
            yield family.make(draw, kind)


def test_there_are_many_families() -> None:
    assert len(trained_families()) >= 90
    assert len(families.held_out()) >= 12
    assert not set(families.held_out()) & set(families.trained())
    assert {family.name for family in fit_families()} == FIT
    assert not FIT & {family.name for family in trained_families()}


def test_items_are_requests_of_the_wire(family: Family) -> None:
    for item in drawn(family, 30):
        question = wire.validate(item.request()).questions["q"]
        assert (question.type, item.family) == (item.kind, family.name)
        offered = 2 if isinstance(question, wire.Noul) else len(question.criteria)
        assert 2 <= offered == len(item.target) <= 16
        assert sum(item.target) == pytest.approx(1)
        assert min(item.target) >= 0
        assert "{" not in str(
            item.question["instructions"] if isinstance(item.question.get("instructions"), str) else ""
        )


def test_answers_are_balanced(family: Family) -> None:
    """Yes and no come about equally often, no place of a choice stands out, no single level is nearly always right."""
    items = list(drawn(family))
    yes = [item.target[0] for item in items if item.kind == "noul"]
    assert 0.3 < sum(yes) / MANY < 0.7
    first = [item.gold == 0 for item in items if item.kind == "choice"]
    assert sum(first) / MANY < 0.75
    levels = [item.gold / (len(item.target) - 1) for item in items if item.kind == "score"]
    assert 0.1 < sum(level >= 0.5 for level in levels) / MANY < 0.97


def test_same_seed_same_items() -> None:
    chosen = [FAMILIES["house_rules"], FAMILIES["support_team"], FAMILIES["urgency"]]
    first, again, other = (list(generated(chosen, 60, seed)) for seed in ("a", "a", "b"))
    assert first == again
    assert first != other


def test_held_out_sentences_are_not_trained_on() -> None:
    """No sentence template of a family that measures occurs in one that trains, nor does any question."""

    def sentences(bank: str) -> set[str]:
        lines = (grammar.BANKS / f"{bank}.txt").read_text(encoding="utf-8").splitlines()
        return {line for line in lines if len(line) > 24 and line[:2] not in ("- ", "* ", "@ ", "^ ")}

    learnt = set().union(*(sentences(f"topics_{part}") for part in "abc"), sentences("signals"), sentences("scales"))
    for bank in ("topics_heldout", "signals_heldout", "scales_heldout"):
        assert sentences(bank)
        assert not sentences(bank) & learnt
    states = {json.dumps(item.state) for family in trained_families() for item in generated([family], 40, "x")}
    for family in families.held_out().values():
        mine = {json.dumps(item.state) for item in generated([family], 40, "x") if item.state not in ("", [])}
        assert not {state for state in mine & states if len(state) > 40}


def test_templates_fill() -> None:
    draw = random.Random(2)
    said = {grammar.fill(draw, "[red|blue] {animal}[, of course|].") for _ in range(200)}
    assert len(said) > 20
    assert all(text.endswith(".") and not set("[]{}|") & set(text) for text in said)


def test_options_are_drawn_anew() -> None:
    item = FAMILIES["news_topic"].make(random.Random(4), "choice")
    while len(item.target) < 4:
        item = FAMILIES["news_topic"].make(random.Random(len(item.target)), "choice")
    names = list(item.question["criteria"])
    orders = set()
    for seed in range(20):
        turned = item.shuffled(random.Random(seed))
        again = list(turned.question["criteria"])
        assert sorted(again) == sorted(names)
        assert again[turned.gold] == names[item.gold]
        orders.add(tuple(again))
    assert len(orders) > 10
    yes_no = FAMILIES["news_topic"].make(random.Random(4), "noul")
    assert yes_no.shuffled(random.Random(1)) == yes_no
