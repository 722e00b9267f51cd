"""The long load of `bench.soak`, made short, and that it would see what it looks for."""

import copy
import random
from dataclasses import replace
from typing import Any

import psutil
import pytest
from servers import StartServer

from bench.soak import Clients, failures, overload, payloads, same, soak

CLIENTS = 16
QUEUED = 8

FINE: dict[str, Any] = {
    "soak": {
        "wrong": 0,
        "lost": 0,
        "counted_otherwise": 0,
        "rss_growth": 0.01,
        "threads": [74, 74],
        "files": [69, 70],
        "threads_at_rest": [10, 10],
        "files_at_rest": [5, 5],
    },
    "overload": {
        "wrong": 0,
        "lost": 0,
        "counted_otherwise": 0,
        "requests": 100,
        "answered": 25,
        "refused": 75,
        "answered_p99_ms": 900,
        "answered_bound_ms": 1000,
        "refused_p99_ms": 20.0,
    },
}


def test_clients_under_load_get_the_answers_they_get_alone(start_server: StartServer) -> None:
    random.seed(3)
    with start_server("--continuous", "--max-queued-requests", str(CLIENTS)) as server:
        clients = Clients("127.0.0.1", server.port, payloads(each=2))
        found = soak(clients, server.url, psutil.Process(server.process.pid), CLIENTS, seconds=12)
        found["rss_growth"] = 0.0  # too short a time to tell
        assert failures({"soak": found}) == []
        assert found["by_status"].keys() == {"200", "400", "422"}
        assert found["answers"] == sum(found["by_status"].values()) > CLIENTS
        assert found["files"][0] > found["files_at_rest"][0]  # while they are connected

        spoilt = [replace(answer, body={}) if at == 0 else answer for at, answer in enumerate(clients.expected)]
        mistaken = Clients(clients.host, clients.port, clients.payloads[:1], spoilt)
        seen = overload(mistaken, server.url, rate=2, seconds=2)
        assert (seen["wrong"], seen["answered"], seen["refused"]) == (4, 0, 0)


def test_too_much_load_is_answered_or_refused_once(start_server: StartServer) -> None:
    random.seed(3)
    with start_server("--continuous", "--max-queued-requests", str(QUEUED)) as server:
        clients = Clients("127.0.0.1", server.port, payloads(each=2))
        soak(clients, server.url, psutil.Process(server.process.pid), 1, seconds=1)
        again = Clients(clients.host, clients.port, clients.payloads, clients.expected)
        found = overload(again, server.url, rate=100, seconds=4, queued=QUEUED)
        found["answered_p99_ms"] = found["refused_p99_ms"] = 0.0  # the machine may be busy
        assert failures(FINE | {"overload": found}) == []
        assert found["answered"] >= QUEUED
        assert found["answered"] + found["refused"] == found["requests"] == 400


def test_nothing_fails_where_all_is_well() -> None:
    assert failures(FINE) == []
    assert failures({"soak": FINE["soak"]}) == []


@pytest.mark.parametrize(
    ("part", "what", "value", "words"),
    [
        ("soak", "wrong", 1, "soak: 1 wrong"),
        ("soak", "lost", 2, "soak: 2 lost"),
        ("soak", "counted_otherwise", 1, "soak: 1 counted_otherwise"),
        ("soak", "rss_growth", 0.04, "soak: memory grew by 4.0%"),
        ("soak", "threads", [74, 80], "soak: threads grew from 74 to 80"),
        ("soak", "files_at_rest", [5, 69], "soak: files_at_rest grew from 5 to 69"),
        ("overload", "wrong", 1, "overload: 1 wrong"),
        ("overload", "refused", 74, "overload: some requests"),
        ("overload", "answered_p99_ms", 1001, "overload: what was taken took 1001 ms"),
        ("overload", "refused_p99_ms", 50.1, "overload: a refusal took 50.1 ms"),
    ],
)
def test_each_bound_is_told(part: str, what: str, value: Any, words: str) -> None:
    report = copy.deepcopy(FINE)
    report[part][what] = value
    (found,) = failures(report)
    assert found.startswith(words)


def test_answers_are_the_same_to_the_fourth_digit() -> None:
    one = {"q": {"type": "noul", "noul": 0.5}, "list": [0.25, "x", None]}
    assert same(one, {"list": [0.25001, "x", None], "q": {"noul": 0.50005, "type": "noul"}})
    for other in (
        {"q": {"type": "noul", "noul": 0.5002}, "list": [0.25, "x", None]},
        {"q": {"type": "noul", "noul": 0.5}, "list": [0.25, "x"]},
        {"q": {"type": "noul", "noul": 0.5}},
        {"q": {"type": "noul", "noul": None}, "list": [0.25, "x", None]},
    ):
        assert not same(one, other)
        assert not same(other, one)
