"""The API's description: it holds what the models say, and says what the server does."""

import json
from typing import Any

import jsonschema_rs
import pytest
from servers import RunningServer, StartServer
from test_service import ASKED, get, post

import openapi
import wire
from docs import api
from service import DecisionHandler


def described(server: RunningServer) -> dict[str, Any]:
    status, headers, body = get(f"{server.url}/openapi.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return json.loads(body)


def schema_of(name: str) -> dict[str, Any]:
    document = openapi.document(keyed=False, page=False)
    return {"$ref": f"#/components/schemas/{name}", "components": document["components"]}


def holds(name: str, value: object) -> bool:
    return jsonschema_rs.Draft202012Validator(schema_of(name)).is_valid(value)


def test_every_route_is_described(server: RunningServer, keyed_server: RunningServer) -> None:
    document = described(server)
    assert document["openapi"] == "3.1.0"
    routes = {path: set(methods) for path, methods in DecisionHandler.routes.items() if path != "/health"}
    found = {path: {method.upper() for method in methods} for path, methods in document["paths"].items()}
    assert found == routes | {"/": {"GET"}}
    assert "401" not in document["paths"]["/v1/systemone"]["post"]["responses"]
    keyed = described(keyed_server)
    for path, method in (("/v1/systemone", "post"), ("/v1/models", "get")):
        assert keyed["paths"][path][method]["security"] == [{"key": []}]
        assert "401" in keyed["paths"][path][method]["responses"]
    assert "/" not in openapi.document(keyed=False, page=False)["paths"]


def noul(**parts: object) -> dict[str, Any]:
    return {"state": "s", "questions": {"q": {"type": "noul", **parts}}}


def choice(criteria: object) -> dict[str, Any]:
    return {"state": "s", "questions": {"q": {"type": "choice", "criteria": criteria}}}


def score(criteria: object) -> dict[str, Any]:
    return {"state": "s", "questions": {"q": {"type": "score", "criteria": criteria}}}


@pytest.mark.parametrize(
    ("request_", "right"),
    [
        (ASKED, True),
        ({**ASKED, "state": 5}, False),
        ({**ASKED, "state": None}, False),
        ({**ASKED, "images": []}, False),
        ({**ASKED, "more": 1}, True),
        ({"state": "s", "questions": {}}, False),
        ({"state": "s", "questions": {"": {"type": "noul", "instructions": "?"}}}, False),
        ({"state": [], "questions": dict.fromkeys(map(str, range(513)), ASKED["questions"]["q"])}, False),
        (noul(), False),
        (noul(instructions=" "), False),
        (noul(instructions="\x1f\x85\u2003"), False),
        (noul(instructions=None, criteria=None), False),
        (noul(criteria={"true": "yes it is"}), True),
        (noul(criteria={"false": ["so"]}), True),
        (noul(criteria={"true": None}), False),
        (choice({}), False),
        (choice({"a": None}), True),
        (choice(["a", "b"]), True),
        (choice(["a", "a"]), False),
        (choice(dict.fromkeys(map(str, range(255)))), True),
        (choice(dict.fromkeys(map(str, range(256)))), False),
        (choice({"a": 1}), False),
        (score([]), False),
        (score(["one"]), True),
        (score(["level"] * 10), True),
        (score(["level"] * 11), False),
        (score(["level", None]), False),
    ],
)
def test_the_description_accepts_what_the_server_accepts(request_: dict[str, Any], right: bool) -> None:
    assert holds("DecisionRequest", request_) == right
    try:
        wire.validate(request_)
    except wire.BlinkError:
        assert not right
    else:
        assert right


def test_answers_and_errors_are_as_described(server: RunningServer) -> None:
    questions = {**ASKED["questions"], **choice(["a", "b"])["questions"], "level": score(["a", "b"])["questions"]["q"]}
    status, _, answer = post(server.url, {"state": "s", "questions": questions | {"yes": ASKED["questions"]["q"]}})
    assert status == 200
    assert holds("DecisionResponse", answer)
    assert not holds("DecisionResponse", answer | {"usage": {"input_tokens": 1}})
    assert not holds("DecisionResponse", answer | {"answers": {"yes": {"type": "noul", "noul": 1.5}}})
    assert holds("ViolationsError", post(server.url, {})[2])
    assert holds("RefusalError", json.loads(get(f"{server.url}/nowhere")[2]))


def test_the_page_of_the_docs_is_made_from_it() -> None:
    assert api.PAGE.read_text() == api.render(), "run `make docs`"


def test_no_page_is_not_described(start_server: StartServer) -> None:
    with start_server("--no-page") as running:
        assert "/" not in described(running)["paths"]
