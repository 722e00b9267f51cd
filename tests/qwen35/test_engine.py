from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen35 import Forked, Qwen35Engine, unsupported

VOCABULARY, LABELS = 512, 300  # as in conftest
CPU = torch.device("cpu")
ROOT = list(range(100, 141))
Whole = Callable[[Forked], torch.Tensor]

request_sizes = st.tuples(st.integers(0, 900), st.lists(st.integers(1, 200), min_size=1, max_size=3))
near_border = st.sampled_from([1, 2, 3, 4, 62, 63, 64, 65, 66, 127, 128, 129, 190, 192])
lengths = st.one_of(near_border, st.integers(1, 150))
requests = st.tuples(st.one_of(st.just(0), lengths), st.lists(lengths, min_size=1, max_size=5))
mixes = st.lists(requests, min_size=1, max_size=5)


@pytest.fixture(scope="module")
def engine(published: tuple[Path, Any]) -> Qwen35Engine:
    return Qwen35Engine(published[0], CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def slicing(published: tuple[Path, Any]) -> Qwen35Engine:
    """Its passes hold so few tokens that documents go through in slices."""
    return Qwen35Engine(published[0], CPU, dtype=torch.float32, token_budget=256)


def forked(seed: int, prefix: int, tails: list[int]) -> Forked:
    draw = np.random.default_rng(seed)
    own = [draw.integers(0, VOCABULARY, n).tolist() for n in tails]
    return Forked(draw.integers(0, VOCABULARY, prefix).tolist(), own)


def probabilities(engine: Qwen35Engine, hidden: torch.Tensor) -> torch.Tensor:
    return (hidden.float() @ engine.head_rows(range(LABELS)).T).softmax(-1)


def assert_equal_to_whole(engine: Qwen35Engine, whole: Whole, batch: list[Forked]) -> None:
    ours = probabilities(engine, engine.hidden(batch))
    theirs = torch.cat([whole(request) for request in batch])
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-4


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=mixes)
def test_any_mix_equals_whole_prompts(engine: Qwen35Engine, whole: Whole, mix: list[tuple[int, list[int]]]) -> None:
    assert_equal_to_whole(engine, whole, [forked(i, *one) for i, one in enumerate(mix)])


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mix=st.lists(request_sizes, min_size=1, max_size=3))
def test_slices_equal_whole_prompts(slicing: Qwen35Engine, whole: Whole, mix: list[tuple[int, list[int]]]) -> None:
    assert_equal_to_whole(slicing, whole, [forked(i, *one) for i, one in enumerate(mix)])


@pytest.mark.parametrize(
    ("prefix", "tails"),
    [
        (5, [1] * 300),
        (0, [1, 2, 3]),
        (0, [1]),
        (1, [1, 1]),
        (2, [700]),
        (300, [1, 257, 600]),
        (256, [1, 1]),
        (258, [256, 256]),
        (63, list(range(1, 40))),
    ],
)
def test_extremes_equal_whole_prompts(slicing: Qwen35Engine, whole: Whole, prefix: int, tails: list[int]) -> None:
    assert_equal_to_whole(slicing, whole, [forked(7, prefix, tails)])


def test_one_question_over_255_options(engine: Qwen35Engine, whole: Whole) -> None:
    assert_equal_to_whole(engine, whole, [forked(3, 40, [1500, 12])])


def test_many_requests_share_a_pass(engine: Qwen35Engine, whole: Whole) -> None:
    batch = [forked(i, i % 70, [1 + i % 9] * (1 + i % 3)) for i in range(64)]
    assert sum(len(request.prefix) + sum(map(len, request.tails)) for request in batch) < engine.token_budget
    assert_equal_to_whole(engine, whole, batch)


def test_alone_and_in_company_agree(engine: Qwen35Engine) -> None:
    batch = [forked(i, 100 + i, [5, 9]) for i in range(6)]
    together = engine.hidden(batch)
    alone = torch.cat([engine.hidden([request]) for request in batch])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=[256, 4096])
def rooted(published: tuple[Path, Any], request: pytest.FixtureRequest) -> Qwen35Engine:
    engine = Qwen35Engine(published[0], CPU, dtype=torch.float32, token_budget=request.param)
    engine.keep_root(ROOT)
    return engine


@pytest.mark.parametrize("behind", [0, 1, 2, 3, 23, 24, 64, 700])
@pytest.mark.parametrize("tails", [[1], [5], [1, 70, 2]])
def test_requests_behind_the_root_equal_whole_prompts(
    rooted: Qwen35Engine, whole: Whole, behind: int, tails: list[int]
) -> None:
    own = forked(behind, behind, tails)
    batch = [Forked([*ROOT, *own.prefix], own.tails), forked(1, 30, [2, 2]), Forked(ROOT[:-1], own.tails)]
    assert_equal_to_whole(rooted, whole, batch)


def test_short_requests_overtake_a_long_document(slicing: Qwen35Engine, whole: Whole) -> None:
    document, short = forked(1, 1000, [4, 4]), forked(2, 20, [3, 3])
    long_job, short_job = slicing.open(document), slicing.open(short)
    assert slicing.step([long_job]) == []
    assert slicing.step([short_job, long_job]) == [short_job]
    steps = 0
    while not long_job.finished:
        slicing.step([long_job])
        steps += 1
    assert steps <= 5
    for job, request in ((long_job, document), (short_job, short)):
        assert (probabilities(slicing, job.hidden) - whole(request)).abs().max() < 1e-4


def test_a_failed_pass_moves_nothing(slicing: Qwen35Engine, whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    request = forked(5, 600, [8, 8])
    job = slicing.open(request)
    slicing.step([job])
    swiglu, calls = slicing.pieces.swiglu, 0

    def fail_late(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("no room")
        return swiglu(x)

    left = job.left
    with monkeypatch.context() as patch:
        patch.setattr(slicing.pieces, "swiglu", fail_late)
        with pytest.raises(torch.OutOfMemoryError):
            slicing.step([job])
    assert job.left == left
    while not job.finished:
        slicing.step([job])
    assert (probabilities(slicing, job.hidden) - whole(request)).abs().max() < 1e-4


def test_nothing_to_do(engine: Qwen35Engine) -> None:
    assert engine.step([]) == []
    job = engine.open(forked(1, 3, [2]))
    assert engine.step([job]) == [job]
    assert engine.step([job]) == []


@pytest.mark.parametrize("tails", [[], [[1], []]])
def test_requests_without_ids_are_refused(engine: Qwen35Engine, tails: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        engine.open(Forked([1], tails))


def test_progress_ends_at_one(published: tuple[Path, Any]) -> None:
    seen: list[float] = []
    Qwen35Engine(published[0], CPU, dtype=torch.float32, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] > 0.9


def test_cpu_is_no_place_for_the_fast_pass(published: tuple[Path, Any]) -> None:
    assert "CUDA" in (unsupported(published[0], CPU) or "")
