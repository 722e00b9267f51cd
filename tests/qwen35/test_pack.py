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
def test_rows_before_a_segment_are_its_prompts_earlier_tokens(mix: list[tuple[int, list[int]]]) -> None:
    plan = plan_of(mix)
    tables = plan.tables()
    row_of = {int(token): row for row, token in enumerate(tables.ids)}
    tail = len(plan.shares)
    for trunk, share in enumerate(plan.shares):
        assert tables.before[trunk].tolist() == [NOTHING] * 3
        ids = share.part.trunk.tolist()
        for own in share.part.tails:
            prompt = ids + own.tolist()
            assert [tables.positions[row_of[token]] for token in prompt] == list(range(len(prompt)))
            expected = [row_of[ids[-step]] if len(ids) >= step else NOTHING for step in (1, 2, 3)]
            assert tables.before[tail].tolist() == expected
            tail += 1


@given(mix=mixes, spare=st.integers(0, 50))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_wider_tables_say_the_same(mix: list[tuple[int, list[int]]], spare: int) -> None:
    plan = plan_of(mix)
    exact, wide = plan.tables(), plan.tables(Shape(*(n + spare for n in plan.shape)))
    n = plan.shape
    assert (wide.ids[: n.tokens] == exact.ids).all()
    places = [*range(n.trunks), *range(n.trunks + spare, n.trunks + spare + n.tails)]
    shift = [at for at in range(len(wide.before)) if at not in places]
    assert (wide.before[places] == exact.before[:-1]).all()
    assert (wide.before[shift] == NOTHING).all()
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
