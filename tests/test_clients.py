"""The clients and the conformance suite that others wrote, against a running server."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import typesafe_sdk as sdk
from servers import JS, KEY, RunningServer, StartServer

LONG = "The ferry came at ten, the mail at noon. " * 100
QUESTIONS: dict[str, sdk.Question] = {
    "late": sdk.Noul(instructions="Is it late?"),
    "sides": sdk.Noul(criteria={"true": "after nine", "false": "before"}),
    "which": sdk.Choice(instructions="Which?", criteria={"북": "north", "the south": None, "🧭": {"way": ["none"]}}),
    "badly": sdk.Score(instructions={"ask": "How badly?"}, criteria=["not", "somewhat", {"very": True}]),
}
NO_RETRY = sdk.RetryPolicy(max_retries=0)
# The smallest picture: what counts is that the client sends it in parts.
PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010804000000b51c0c02"
    "0000000b4944415478da6364f80f00010501012718e3660000000049454e44ae426082"
)

Answered = sdk.SystemOneResponse


# --- the conformance suite -------------------------------------------------------------------------------------------


def conformance(server: RunningServer, report: Path, *flags: str) -> dict[str, Any]:
    """The suite's own report; fails the test unless the suite calls the server conformant."""
    suite = Path(sys.executable).with_name("jevcompat")
    done = subprocess.run(
        [suite, "test", server.url, "--json", report, *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def passed(report: dict[str, Any], level: str) -> tuple[int, int]:
    """How many requirements of a level hold, of how many that the suite could test."""
    found = report["summary"][level]
    return found["passed"], found["tested"]


def unmet(report: dict[str, Any], status: str) -> set[str]:
    return {row["id"] for row in report["results"] if row["status"] == status}


def test_conformance_without_a_key(server: RunningServer, tmp_path: Path) -> None:
    report = conformance(server, tmp_path / "report.json")
    assert passed(report, "MUST") == (32, 32)
    assert passed(report, "SHOULD") == (11, 12)
    # Unreadable JSON is a 400 here by decision; a model that is unknown is answered, so its refusal has no shape.
    assert unmet(report, "fail") == {"errors.validation-shape"}
    assert unmet(report, "skip") == {"auth.bearer", "auth.missing", "auth.invalid", "errors.shape"}


def test_conformance_with_a_key(keyed_server: RunningServer, tmp_path: Path) -> None:
    report = conformance(keyed_server, tmp_path / "report.json", "--key", KEY)
    assert passed(report, "MUST") == (32, 32)
    assert passed(report, "SHOULD") == (13, 14)
    assert unmet(report, "fail") == {"errors.validation-shape"}
    assert unmet(report, "skip") == {"auth.ignored-when-off", "errors.shape"}


# --- the Python client -----------------------------------------------------------------------------------------------


def ask(
    server: RunningServer, state: Any, questions: Any = QUESTIONS, *, key: str = "unused", **options: Any
) -> Answered:
    """Ask through the blocking client, without retries."""
    with sdk.TypeSafeClient(base_url=server.url, api_key=key, retry=NO_RETRY, timeout=60, **options) as client:
        return client.system_one(state, questions)


def ask_async(
    server: RunningServer, state: Any, questions: Any = QUESTIONS, *, key: str = "unused", **options: Any
) -> Answered:
    """Ask through the asynchronous client, without retries."""

    async def call() -> Answered:
        made = sdk.AsyncTypeSafeClient(base_url=server.url, api_key=key, retry=NO_RETRY, timeout=60, **options)
        async with made as client:
            return await client.system_one(state, questions)

    return asyncio.run(call())


Ask = Callable[..., Answered]
both_clients = pytest.mark.parametrize("ask", [ask, ask_async], ids=["sync", "async"])


@both_clients
def test_python_client_reads_every_type(server: RunningServer, ask: Ask) -> None:
    result = ask(server, {"note": "The boat came at ten. 배", "n": [1, None, 0.5]})
    assert list(result.answers) == list(QUESTIONS)
    assert all(0 <= result.nouls[name].noul <= 1 for name in ("late", "sides"))
    which, badly = result.choices["which"], result.scores["badly"]
    assert list(which.probabilities) == ["북", "the south", "🧭"]
    assert which.probabilities[which.choice] == max(which.probabilities.values())
    assert list(badly.probabilities) == [0, 1, 2]
    assert badly.legend == {0: "not", 1: "somewhat", 2: {"very": True}}
    assert badly.score == pytest.approx(sum(level * p for level, p in badly.probabilities.items()))
    assert result.usage.input_tokens
    assert result.usage.output_tokens == 0
    assert re.fullmatch(r"req_[0-9a-f]{32}", result.request_id)


@both_clients
def test_python_client_compresses_long_bodies(server: RunningServer, ask: Ask) -> None:
    sent: list[str | None] = []

    def note(request: httpx2.Request) -> None:
        sent.append(request.headers.get("content-encoding"))

    async def note_async(request: httpx2.Request) -> None:
        note(request)

    def client() -> httpx2.Client | httpx2.AsyncClient:
        if ask is ask_async:
            return httpx2.AsyncClient(timeout=60, event_hooks={"request": [note_async]})
        return httpx2.Client(timeout=60, event_hooks={"request": [note]})

    packed = ask(server, LONG, http_client=client())
    plain = ask(server, LONG, http_client=client(), compression=False)
    assert sent == ["zstd", None]
    assert packed.answers == plain.answers


@both_clients
def test_python_client_keeps_its_connection(server: RunningServer, ask: Ask) -> None:
    """Answers one after another and many at once, all on the connections of one client."""

    async def many() -> list[Answered]:
        async with sdk.AsyncTypeSafeClient(base_url=server.url, api_key="unused", retry=NO_RETRY, timeout=60) as client:
            return await asyncio.gather(*(client.system_one(f"It is {hour}.", QUESTIONS) for hour in range(16)))

    def in_turn() -> list[Answered]:
        with sdk.TypeSafeClient(base_url=server.url, api_key="unused", retry=NO_RETRY, timeout=60) as client:
            return [client.system_one(f"It is {hour}.", QUESTIONS) for hour in range(16)]

    results = asyncio.run(many()) if ask is ask_async else in_turn()
    alone = [ask(server, f"It is {hour}.") for hour in range(16)]
    assert [result.answers for result in results] == [result.answers for result in alone]
    assert len({result.nouls["late"].noul for result in alone}) == 16


def test_python_client_lists_models(server: RunningServer, keyed_server: RunningServer) -> None:
    async def listed() -> sdk.ListModelsResponse:
        async with sdk.AsyncTypeSafeClient(base_url=keyed_server.url, api_key=KEY, retry=NO_RETRY) as client:
            return await client.models.list()

    with sdk.TypeSafeClient(base_url=server.url, api_key="unused", retry=NO_RETRY) as client:
        found = client.models.list()
    assert [model.name for model in found.models] == [ask(server, "s").model]
    assert asyncio.run(listed()).models == found.models


@both_clients
def test_python_client_with_a_key(keyed_server: RunningServer, ask: Ask) -> None:
    assert ask(keyed_server, "s", key=KEY).answers
    with pytest.raises(sdk.TypeSafeAuthenticationError, match="API key") as refused:
        ask(keyed_server, LONG, key="another")
    assert re.fullmatch(r"req_[0-9a-f]{32}", refused.value.request_id or "")


REFUSED: list[Any] = [
    pytest.param("s", {"q": {"type": "boolean"}}, sdk.TypeSafeUnprocessableEntityError, "questions.q: ", id="type"),
    pytest.param(7, QUESTIONS, sdk.TypeSafeUnprocessableEntityError, "state: ", id="state"),
    pytest.param(
        {"photo": sdk.Image(PICTURE)}, QUESTIONS, sdk.TypeSafeUnprocessableEntityError, "text only", id="picture"
    ),
    pytest.param(
        "s", {"q": sdk.Box(instructions="The boat")}, sdk.TypeSafeUnprocessableEntityError, "text only", id="box"
    ),
    pytest.param("tide " * 140_000, QUESTIONS, sdk.TypeSafeUnprocessableEntityError, "maximum context", id="context"),
    pytest.param("x" * (21 << 20), QUESTIONS, sdk.TypeSafeAPIError, "413 ", id="size"),
]


@both_clients
@pytest.mark.parametrize(("state", "questions", "error", "says"), REFUSED)
def test_python_client_maps_refusals(
    server: RunningServer, ask: Ask, state: Any, questions: Any, error: type[sdk.TypeSafeAPIError], says: str
) -> None:
    with pytest.raises(error, match=says) as refused:
        ask(server, state, questions)
    assert type(refused.value) is error
    assert refused.value.body["error"]


@both_clients
def test_python_client_maps_a_bad_request(server: RunningServer, ask: Ask) -> None:
    with pytest.raises(sdk.TypeSafeBadRequestError, match="gzip"):
        ask(server, "s", compression=False, headers={"Content-Encoding": "gzip"})


@both_clients
def test_python_client_maps_a_wrong_address(server: RunningServer, ask: Ask) -> None:
    with pytest.raises(sdk.TypeSafeNotFoundError):
        ask(RunningServerAt(server, "/v1"), "s")


class RunningServerAt:
    """The same server under a base address with one part too many."""

    def __init__(self, server: RunningServer, extra: str) -> None:
        self.url = server.url + extra


def test_python_client_hears_that_the_server_is_loading(start_server: StartServer) -> None:
    with start_server(wait=False) as server:
        while True:
            try:
                with pytest.raises(sdk.TypeSafeInternalServerError, match="loading") as refused:
                    ask(server, "s")
                break
            except sdk.TypeSafeAPIConnectionError:
                assert server.process.poll() is None, server.stderr
        assert refused.value.status == 503
        assert refused.value.headers["retry-after"] == "1"
        # With its own patience the client gets its answer as soon as there is one.
        patient = sdk.RetryPolicy(max_retries=200, http_statuses={503})
        with sdk.TypeSafeClient(base_url=server.url, api_key="unused", retry=patient, timeout=60) as client:
            assert client.system_one("s", QUESTIONS).answers


# --- the JavaScript client -------------------------------------------------------------------------------------------


def test_javascript_client(node: str, server: RunningServer, keyed_server: RunningServer) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TYPESAFE_")}
    command = [node, "ask.mjs", server.url, keyed_server.url, KEY]
    done = subprocess.run(command, cwd=JS, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)

    result = report["result"]
    assert report["status"] == 200
    assert re.fullmatch(r"req_[0-9a-f]{32}", report["requestId"])
    assert [model["name"] for model in report["models"]] == [result["model"]]
    assert list(result["answers"]) == ["late", "described", "which", "badly"]
    assert 0 <= result["answers"]["late"]["noul"] <= 1
    which, badly = result["answers"]["which"], result["answers"]["badly"]
    assert list(which["probabilities"]) == ["북", "the south", "🧭"]
    assert which["probabilities"][which["choice"]] == max(which["probabilities"].values())
    assert badly["legend"] == {"0": "not", "1": "somewhat", "2": {"very": True}}
    assert report["long"]["input_tokens"] > 20 * report["sparse"]["input_tokens"] > 0
    assert report["keyed"]["input_tokens"] > 0

    refused = {name: (row["name"], row["status"]) for name, row in report["refused"].items()}
    assert refused == {
        "missing": ("UnprocessableEntityError", 422),
        "typed": ("UnprocessableEntityError", 422),
        "stranger": ("AuthenticationError", 401),
        "strangerModels": ("AuthenticationError", 401),
        "nowhere": ("NotFoundError", 404),
    }
    assert "questions.q" in report["refused"]["typed"]["message"]
    assert all(re.fullmatch(r"req_[0-9a-f]{32}", row["requestId"]) for row in report["refused"].values())
