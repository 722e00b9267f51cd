"""Many clients at once on a real model: everyone gets their own answer, and grouping modes group."""

import json
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any

import pytest
from servers import RunningServer, StartServer
from test_service import post

CLIENTS = 24
REQUESTS = 40  # different ones
ROUNDS = 5  # of all of them, so that each meets other neighbours
QUESTIONS: Mapping[str, Any] = {
    "late": {"type": "noul", "instructions": "Is it late?"},
    "kind": {"type": "choice", "criteria": {"boat": "a boat", "gate": "a gate", "bill": None}},
    "badly": {"type": "score", "instructions": "How badly?", "criteria": ["not", "somewhat", "very", "utterly"]},
}
Numbers = Mapping[str, Sequence[float]]


def body(number: int) -> dict[str, Any]:
    """A request that differs from all others in its state and from most in its length and questions."""
    names = list(QUESTIONS)[: number % 3 + 1]
    state = f"case {number}: {'and so on ' * (number % 17)}"
    return {"state": state, "questions": {name: QUESTIONS[name] for name in names}}


def numbers(answer: Any) -> Numbers:
    """The probabilities of each question."""
    return {
        name: [one["noul"]] if one["type"] == "noul" else list(one["probabilities"].values())
        for name, one in answer["answers"].items()
    }


@pytest.fixture(scope="module")
def alone(server: RunningServer) -> list[Numbers]:
    """What each request is answered when nothing else goes on."""
    found = [numbers(post(server.url, body(number))[2]) for number in range(REQUESTS)]
    assert len({round(one["late"][0], 3) for one in found}) > REQUESTS // 2  # a mix-up would show
    return found


@pytest.fixture(scope="module")
def grouping(start_server: StartServer) -> Iterator[dict[str, RunningServer]]:
    """A server of each grouping mode; both start at the same time."""
    flags = {"window": ("--batch-window-ms", "20"), "continuous": ("--continuous",)}
    with ExitStack() as stack:
        servers = {mode: stack.enter_context(start_server(*given, wait=False)) for mode, given in flags.items()}
        for one in servers.values():
            one.wait_ready()
        yield servers


def passes(server: RunningServer) -> tuple[float, float]:
    """Passes made so far and requests in them."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as metrics:
        lines = dict(line.rsplit(" ", 1) for line in metrics.read().decode().splitlines() if line[0] != "#")
    return float(lines["blink_batch_requests_count"]), float(lines["blink_batch_requests_sum"])


def ask_all(server: RunningServer) -> list[tuple[int, int, Any]]:
    """Every request several times over, from many clients that each keep a connection: number, status, answer."""
    own = threading.local()

    def ask(number: int) -> tuple[int, int, Any]:
        if not hasattr(own, "connection"):
            own.connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
        own.connection.request("POST", "/v1/systemone", json.dumps(body(number)))
        answer = own.connection.getresponse()
        return number, answer.status, json.loads(answer.read())

    order = [(7 * number + turn) % REQUESTS for turn in range(ROUNDS) for number in range(REQUESTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(ask, order))


def check(answered: list[tuple[int, int, Any]], alone: list[Numbers]) -> None:
    assert len(answered) == REQUESTS * ROUNDS
    for number, status, answer in answered:
        assert status == 200, answer
        found = numbers(answer)
        assert list(found) == list(alone[number])
        for name, expected in alone[number].items():
            assert found[name] == pytest.approx(expected, abs=1e-4)


def test_one_at_a_time(server: RunningServer, alone: list[Numbers]) -> None:
    before = passes(server)
    check(ask_all(server), alone)
    after = passes(server)
    assert (after[0] - before[0], after[1] - before[1]) == (REQUESTS * ROUNDS, REQUESTS * ROUNDS)


@pytest.mark.parametrize("mode", ["window", "continuous"])
def test_grouped(grouping: dict[str, RunningServer], alone: list[Numbers], mode: str) -> None:
    before = passes(grouping[mode])
    check(ask_all(grouping[mode]), alone)
    after = passes(grouping[mode])
    assert after[1] - before[1] == REQUESTS * ROUNDS
    assert after[0] - before[0] < REQUESTS * ROUNDS / 2


def test_neighbours_that_fail_or_leave_change_nothing(grouping: dict[str, RunningServer], alone: list[Numbers]) -> None:
    server = grouping["continuous"]
    done = threading.Event()

    def spoil(number: int) -> list[int]:
        statuses = []
        while not done.is_set():
            statuses.append(post(server.url, {"state": "spoilt", "questions": {"q": {"type": "no such"}}})[0])
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as leaving:
                whole = json.dumps(body(number)).encode()
                leaving.sendall(b"POST /v1/systemone HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(whole), whole))
        return statuses

    with ThreadPoolExecutor(2) as pool:
        spoilers = [pool.submit(spoil, number) for number in range(2)]
        try:
            check(ask_all(server), alone)
        finally:
            done.set()
        for one in spoilers:
            assert set(one.result(60)) == {422}
