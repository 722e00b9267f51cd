import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wire
from wire import LIMITS, BlinkError

NOUL = {"type": "noul", "instructions": "Is it late?"}


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "jev-latest", "state": "fog", "questions": {"q": NOUL}} | fields


def question(**fields: Any) -> dict[str, Any]:
    return request(questions={"q": fields})


def refused(data: Any) -> BlinkError:
    with pytest.raises(BlinkError) as caught:
        wire.validate(data)
    return caught.value


def refused_body(body: bytes) -> BlinkError:
    with pytest.raises(BlinkError) as caught:
        wire.read(body)
    return caught.value


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "noul", "instructions": "Late?"},
        {"type": "noul", "criteria": {"true": "late"}},
        {"type": "noul", "criteria": {"false": {"a": 1}}},
        {"type": "noul", "criteria": {"yes": "late", "no": "early"}},
        {"type": "noul", "instructions": "Late?", "criteria": None},
        {"type": "noul", "instructions": "Late?", "criteria": {}},
        {"type": "noul", "instructions": {"ask": "Late?", "n": 1}, "criteria": {"true": None, "false": None}},
        {"type": "choice", "criteria": {"a": None}},
        {"type": "choice", "criteria": {"a": "x", "b": ["y", 1], "c": {"z": None}}},
        {"type": "choice", "criteria": ["late", "early"]},
        {"type": "choice", "instructions": None, "criteria": {str(i): None for i in range(255)}},
        {"type": "score", "criteria": ["only"]},
        {"type": "score", "criteria": ["low", {"mid": 1}, ["high"]]},
        {"type": "score", "criteria": ["l"] * 10},
    ],
)
def test_valid_questions(fields: dict[str, Any]) -> None:
    checked = wire.validate(question(**fields)).questions["q"]
    assert checked.type == fields["type"]


@pytest.mark.parametrize(
    ("fields", "loc", "kind"),
    [
        ({"type": "noul"}, ["noul"], "nothing_to_judge"),
        ({"type": "noul", "instructions": "  "}, ["noul"], "nothing_to_judge"),
        ({"type": "noul", "criteria": {"true": None, "false": ""}}, ["noul"], "nothing_to_judge"),
        ({"type": "noul", "instructions": 5}, ["noul", "instructions"], "json_content"),
        ({"type": "noul", "criteria": ["a"]}, ["noul", "criteria"], "model_type"),
        ({"type": "noul", "criteria": {"true": True}}, ["noul", "criteria", "true"], "json_content"),
        ({"type": "choice"}, ["choice", "criteria"], "missing"),
        ({"type": "choice", "criteria": None}, ["choice", "criteria"], "dict_type"),
        ({"type": "choice", "criteria": {}}, ["choice", "criteria"], "too_short"),
        ({"type": "choice", "criteria": []}, ["choice", "criteria"], "too_short"),
        ({"type": "choice", "criteria": ["a", 1]}, ["choice", "criteria"], "string_type"),
        ({"type": "choice", "criteria": ["a", "a"]}, ["choice", "criteria"], "duplicate_option"),
        ({"type": "choice", "criteria": {"a": 5}}, ["choice", "criteria", "a"], "json_content"),
        ({"type": "choice", "criteria": {str(i): None for i in range(256)}}, ["choice", "criteria"], "too_long"),
        ({"type": "score"}, ["score", "criteria"], "missing"),
        ({"type": "score", "criteria": []}, ["score", "criteria"], "too_short"),
        ({"type": "score", "criteria": ["l"] * 11}, ["score", "criteria"], "too_long"),
        ({"type": "score", "criteria": {"0": "a"}}, ["score", "criteria"], "list_type"),
        ({"type": "score", "criteria": ["a", None]}, ["score", "criteria", 1], "json_content"),
        ({"type": "score", "criteria": [1]}, ["score", "criteria", 0], "json_content"),
        ({"type": "boolean"}, [], "union_tag_invalid"),
        ({"type": "box", "instructions": "Where?"}, [], "text_only"),
        ({}, [], "union_tag_not_found"),
    ],
)
def test_refused_questions(fields: dict[str, Any], loc: list[str | int], kind: str) -> None:
    error = refused(question(**fields))
    assert error.status == 422
    assert [(row["type"], row["loc"]) for row in error.detail] == [(kind, ["body", "questions", "q", *loc])]


@pytest.mark.parametrize(
    ("fields", "loc", "kind"),
    [
        ({"state": None}, ["state"], "json_content"),
        ({"state": 5}, ["state"], "json_content"),
        ({"state": True}, ["state"], "json_content"),
        ({"model": 5}, ["model"], "string_type"),
        ({"questions": {}}, ["questions"], "too_short"),
        ({"questions": [NOUL]}, ["questions"], "dict_type"),
        ({"questions": {"": NOUL}}, ["questions", ""], "empty_id"),
        ({"questions": {"q": 5}}, ["questions", "q"], "model_attributes_type"),
        ({"questions": dict.fromkeys(map(str, range(513)), NOUL)}, ["questions"], "too_long"),
        ({"state": [math.inf]}, ["state"], "finite_number"),
        ({"state": nested(64)}, ["state"], "too_deep"),
        ({"questions": {"q": NOUL | {"instructions": nested(62)}}}, ["questions"], "too_deep"),
        ({"images": []}, ["images"], "text_only"),
        ({"assets": {"a": {}}}, ["assets"], "text_only"),
        ({"state": {"see": ["data:image/png;base64,AAAA"]}}, ["state"], "text_only"),
        ({"state": "DATA:image/svg+xml;charset=utf-8;base64,AAAA"}, ["state"], "text_only"),
    ],
)
def test_refused_requests(fields: dict[str, Any], loc: list[str | int], kind: str) -> None:
    error = refused(request(**fields))
    assert error.status == 422
    assert [(row["type"], row["loc"]) for row in error.detail] == [(kind, ["body", *loc])]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"type": "choice", "criteria": {str(i): None for i in range(256)}}, "options per choice"),
        ({"type": "score", "criteria": ["l"] * 11}, "a score takes 2 to 10 levels"),
        ({"type": "box"}, "this model reads text only"),
    ],
)
def test_wording_that_clients_look_for(fields: dict[str, Any], words: str) -> None:
    assert words in refused(question(**fields)).message


def test_limits_are_accepted_to_the_last() -> None:
    assert len(wire.validate(request(questions=dict.fromkeys(map(str, range(512)), NOUL))).questions) == 512
    wire.validate(request(state=nested(63)))
    wire.validate(request(state="data:image/png is a format", images=None, assets=None))


def test_what_is_not_needed_is_ignored() -> None:
    extra = request(seed=7, x_trace_id="t", questions={"q": NOUL | {"labels": [1], "criteria": {"maybe": 5}}})
    assert wire.validate(extra).questions.keys() == {"q"}
    del extra["model"]
    wire.validate(extra)


def test_all_violations_are_listed_up_to_the_cap() -> None:
    error = refused(
        {"state": 5, "questions": {"a": {}, "b": NOUL, "c": {"type": "choice", "criteria": {"x": 1, "y": 2}}}}
    )
    assert [row["loc"][1:] for row in error.detail] == [
        ["state"],
        ["questions", "a"],
        ["questions", "c", "choice", "criteria", "x"],
        ["questions", "c", "choice", "criteria", "y"],
    ]
    many = refused(question(type="choice", criteria=dict.fromkeys(map(str, range(50)), 1)))
    assert len(many.detail) == LIMITS.violations_listed == 20
    assert many.message.endswith("and 30 more")


def test_errors_do_not_echo_values() -> None:
    secret = "correct horse"
    for data in (
        request(state=[secret, math.nan]),
        request(model=[secret]),
        question(type=secret),
        question(type="noul", criteria=secret),
        question(type="choice", criteria=secret),
        question(type="score", criteria=secret),
        {"state": {secret: secret}, "questions": secret},
    ):
        assert secret not in json.dumps(refused(data).body)
    assert secret not in json.dumps(refused_body(f'{{"state": "{secret}'.encode()).body)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"fog",
        b'{"state": "a" "b"}',
        b'{"state": NaN}',
        b'{"state": [Infinity]}',
        b'{"state": "\xff"}',
        b'{"state": "\xed\xa0\x80"}',
        b'{"state": "\\ud800"}',
        b'{"state": "\\udc00 alone"}',
        b'{"state": ' + b"[" * 20_000,
        b'{"state": ' + b"9" * 5_000 + b"}",
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        b"{} {}",
        b"[]",
        b'"text"',
        b"null",
    ],
)
def test_what_is_no_json_object_is_400(body: bytes) -> None:
    error = refused_body(body)
    assert error.status == 400
    assert error.detail[0]["loc"] == ["body"]


def test_lenient_reading() -> None:
    body = json.dumps(request()).encode()
    assert wire.read(b"\xef\xbb\xbf" + body) == wire.read(b" " + body) == wire.read(body)
    assert (
        wire.read(b'{"state": "a", "state": "b", "questions": {"q": {"type": "noul", "instructions": "?"}}}').state
        == "b"
    )
    empty = refused_body(b"")
    assert empty.status == 422
    assert [row["loc"] for row in empty.detail] == [["body", "state"], ["body", "questions"]]
    assert refused_body(b'{"state": {"n": 1e999}, "questions": {"q": {}}}').status == 422


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(json_values, max_size=3) | st.dictionaries(st.text(), json_values, max_size=3) | st.text())
def test_a_state_arrives_as_the_standard_library_reads_it(state: Any) -> None:
    body = json.dumps(request(state=state)).encode()
    arrived = wire.read(body).state
    assert json.dumps(arrived) == json.dumps(json.loads(body)["state"])


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with pytest.raises(BlinkError) as caught:
        wire.read(body)
    assert caught.value.status in (400, 422)


@given(json_values)
def test_any_json_is_read_or_refused(value: Any) -> None:
    for data in (value, request(state=value), request(questions=value), request(questions={"q": value})):
        try:
            wire.validate(data)
        except BlinkError as error:
            assert error.status in (400, 422)
            assert error.message
            assert all(row["loc"][0] == "body" for row in error.detail)
