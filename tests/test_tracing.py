"""The trace context of requests, by the rules of its standard."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracing

ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{ID}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (GOOD, True),
        (f" {GOOD}\t", True),
        (f"00-{ID}-{SPAN}-00", False),
        (f"00-{ID}-{SPAN}-fe", False),
        (f"01-{ID}-{SPAN}-03", True),
        (f"cc-{ID}-{SPAN}-01-what-the-future-brings", True),
    ],
)
def test_valid(header: str, sampled: bool) -> None:
    assert tracing.read([header]) == (ID, SPAN, sampled)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [GOOD, GOOD],
        [""],
        [GOOD.upper()],
        [f"ff-{ID}-{SPAN}-01"],
        [f"00-{ID}-{SPAN}-01-more"],
        [f"00-{ID}-{SPAN}-01-"],
        [f"01-{ID}-{SPAN}-01more"],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{ID}-{'0' * 16}-01"],
        [f"00-{ID[:-1]}-{SPAN}-01"],
        [f"00-{ID}-{SPAN}-1"],
        [f"00-{ID}-{SPAN}"],
        [f"0-{ID}-{SPAN}-01"],
        [f"00_{ID}_{SPAN}_01"],
        [f"{GOOD}, {GOOD}"],
        ["00-" + "٠" * 32 + f"-{SPAN}-01"],
    ],
)
def test_invalid(headers: list[str]) -> None:
    assert tracing.read(headers) is None


@given(st.lists(st.text(alphabet="0123456789abcdefF- \t\n", max_size=60), max_size=2))
def test_only_ids_come_out(headers: list[str]) -> None:
    found = tracing.read(headers)
    assert found is None or (len(found.trace_id), len(found.parent_id)) == (32, 16)
