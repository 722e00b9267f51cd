from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35.pack import CHUNK, NOTHING, Forked, Plan, Shape, divide, parts_of

TILE = 32
mixes = st.lists(
    st.tuples(st.integers(0, 200), st.lists(st.integers(1, 90), min_size=1, max_size=6)), min_size=1, max_size=6
)


def plan_of(mix: list[tuple[int, list[int]]], budget: int = 100_000) -> Plan:
    ids = iter(range(10**6))
    batch = [Forked([next(ids) for _ in range(p)], [[next(ids) for _ in range(n)] for n in tails]) for p, tails in mix]
    return Plan(divide([part for one in batch for part in parts_of(one, budget)], budget, 1000), TILE)


@given(mix=mixes)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_token_is_in_one_segment_chunk_and_tile(mix: list[tuple[int, list[int]]]) -> None:
    plan = plan_of(mix)
    tables = plan.tables()
    total = sum(p + sum(tails) for p, tails in mix)
    assert plan.shape.tokens == total == tables.borders[-1]
    assert sorted(tables.ids.tolist()) == list(range(total))
    for rows in (
        [r for start, count in tables.chunk_rows for r in range(start, start + count)],
        [r for start, count, *_ in tables.tiles for r in range(start, start + count)],
    ):
        assert sorted(rows) == list(range(total))


@given(mix=mixes)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_back_rows_are_the_prompts_earlier_tokens(mix: list[tuple[int, list[int]]]) -> None:
    plan = plan_of(mix)
    tables = plan.tables()
    row_of = {int(token): row for row, token in enumerate(tables.ids)}
    for share in plan.shares:
        trunk = share.part.trunk.tolist()
        for prompt in [trunk, *(trunk + tail.tolist() for tail in share.part.tails)]:
            for at, token in enumerate(prompt):
                row = row_of[token]
                assert tables.positions[row] == at
                expected = [row_of[prompt[at - step]] if at >= step else NOTHING for step in (1, 2, 3)]
                assert tables.back[row].tolist() == expected


@given(mix=mixes, spare=st.integers(0, 50))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_wider_tables_say_the_same(mix: list[tuple[int, list[int]]], spare: int) -> None:
    plan = plan_of(mix)
    exact, wide = plan.tables(), plan.tables(Shape(*(n + spare for n in plan.shape)))
    n = plan.shape
    assert (wide.ids[: n.tokens] == exact.ids).all()
    assert (wide.back[: n.tokens] == exact.back).all()
    assert (wide.back[n.tokens :] == NOTHING).all()
    assert (wide.reads[: n.reads] == exact.reads).all()
    assert (wide.tiles[: n.tiles] == exact.tiles).all()
    assert not wide.tiles[n.tiles :].any()
    assert (wide.chunk_rows[: n.chunks] == exact.chunk_rows).all()
    assert not wide.chunk_rows[n.chunks :, 1].any()
    lengths = np.diff(wide.borders)
    assert (lengths[wide.chunk_of[n.chunks :, 0]] == 0).all()
    assert wide.borders[-1] == n.tokens


def test_a_slice_ends_at_a_chunk_border_and_the_rest_waits() -> None:
    (part,) = parts_of(Forked(range(1000), [[1, 2], [3]]), 300)
    (share,) = divide([part], 300, 10)
    assert (share.start, share.stop, share.first, share.last) == (0, 256, 0, 0)
    assert share.stop % CHUNK == 0
    assert share.saves


def test_a_lone_question_and_long_tails_are_not_forked() -> None:
    (lone,) = parts_of(Forked([1, 2], [[3]]), 300)
    assert (lone.trunk.tolist(), lone.tails, lone.reads_trunk) == ([1, 2, 3], [], True)
    parts = parts_of(Forked([1], [[2] * 400, [3]]), 300)
    assert [len(part.trunk) for part in parts] == [401, 2]
    assert [part.first for part in parts] == [0, 1]
