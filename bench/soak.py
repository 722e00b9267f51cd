"""A long load on a real server, with every answer checked, and then more load than it can take.

    python -m bench.soak --model FOLDER --minutes 10 --json soak.json

First `--clients` clients send valid and invalid requests, some over kept connections and some over new ones. Every
answer must be the one that the server gave when it was asked alone (probabilities to 1e-4: company changes roundings).
Then requests arrive at four times the rate that the server sustained, each over a connection of its own that is read
to its end: those the server takes must be answered in the time that its queue promises, the others must be told 503
with Retry-After at once. In both parts the server must have counted the responses that the clients got, no less and
no more. Ends with status 1 if a bound is passed; "failed" in the figures says which.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from bench.load import free_port, wait_ready
from bench.serving import body, versions

GROWTH = 0.03  # of the resident memory, from the second minute to the last
MORE = 4  # threads or files that may come and go with connections
REFUSED_MS = 50.0
UNEVEN = 1.25  # passes differ in what they hold
OVER = 4  # times the rate that the server sustained
QUEUED = 64  # --max-queued-requests, and with --continuous the most requests of a pass
LOST_S = 240.0  # beyond the server's own limit of 180 s for a decision
NEW_CONNECTION = 0.1  # share of the requests that come over one
INVALID = (
    b"{torn",
    b"[]",
    b'{"state": "x"}',
    b'{"state": "x", "questions": {}}',
    b'{"state": "x", "questions": {"q": {"type": "noul"}}}',
    b'{"state": "x", "questions": {"q": {"type": "score", "criteria": "no list"}}}',
    b'{"state": "x", "questions": {"q": {"type": "other", "instructions": "?"}}, "images": []}',
)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: Any


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes, *, last: bool = False
) -> Answer:
    """Post a request over an open connection, the last one or one of many.

    Raises:
        OSError, EOFError: there is no whole answer.
        ValueError: it is no answer to one request.
    """
    head = f"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n"
    writer.write(f"{head}{'Connection: close' if last else 'Connection: keep-alive'}\r\n\r\n".encode() + payload)
    async with asyncio.timeout(LOST_S):
        start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        answer = await reader.readexactly(int(headers.get("content-length", "-1")))
        if last and await reader.read():
            raise ValueError("more than one answer")
    return Answer(int(start.split(" ")[1]), headers, json.loads(answer))


def same(one: Any, other: Any) -> bool:
    """Whether two answers are equal, numbers to 1e-4."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, (float, int)):
        return math.isclose(one, other, abs_tol=1e-4)
    return bool(one == other)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def payloads(each: int = 8) -> list[bytes]:
    """Requests to draw from: `each` of four kinds that are valid, and all of `INVALID`."""
    return [body(kind) for kind in ("short", "six", "one", "eight") for _ in range(each)] + list(INVALID)


@dataclass(slots=True)
class Clients:
    """What clients send, and what became of it."""

    host: str
    port: int
    payloads: list[bytes]
    expected: list[Answer] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    lost: int = 0
    answered_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    async def ask_alone(self) -> None:
        """Learn what each request is answered while nothing else goes on."""
        reader, writer = await self.open()
        for payload in self.payloads:
            self.expected.append(await exchange(reader, writer, payload))
        writer.close()

    def take(self, at: int, answer: Answer, began: float, *, may_refuse: bool = False) -> None:
        """Judge the answer to request number `at`, which began at this time of the performance counter."""
        milliseconds = (time.perf_counter() - began) * 1e3
        self.statuses[answer.status] += 1
        expected = self.expected[at]
        if may_refuse and answer.status == 503 and "retry-after" in answer.headers:
            self.refused_ms.append(milliseconds)
        elif answer.status != expected.status or not same(expected.body, answer.body):
            self.wrong += 1
        elif answer.status == 200:
            self.answered_ms.append(milliseconds)

    async def closed_loop(self, draw: random.Random, stop: float) -> None:
        """One client, which sends its next request when it has its answer."""
        connection = None
        while time.perf_counter() < stop:
            if connection and draw.random() < NEW_CONNECTION:
                connection[1].close()
                connection = None
            at = draw.randrange(len(self.payloads))
            began = time.perf_counter()
            try:
                connection = connection or await self.open()
                self.take(at, await exchange(*connection, self.payloads[at]), began)
                continue
            except (OSError, EOFError):
                self.lost += 1
            except (ValueError, LookupError):
                self.wrong += 1
            if connection:
                connection[1].close()
            connection = None
            await asyncio.sleep(0.1)
        if connection:
            connection[1].close()

    async def open_loop(self, rate: float, seconds: float) -> int:
        """Valid requests at `rate` a second, whatever became of the ones before; how many."""
        valid = [at for at, answer in enumerate(self.expected) if answer.status == 200]
        requests = int(rate * seconds)
        async with asyncio.TaskGroup() as tasks:
            began = time.perf_counter()
            for n in tqdm(range(requests), desc="overload", unit="request", disable=None):
                await asyncio.sleep(max(0.0, began + n / rate - time.perf_counter()))
                tasks.create_task(self._alone(valid[n % len(valid)]))
        return requests

    async def _alone(self, at: int) -> None:
        began = time.perf_counter()
        writer = None
        try:
            reader, writer = await self.open()
            self.take(at, await exchange(reader, writer, self.payloads[at], last=True), began, may_refuse=True)
        except (OSError, EOFError):
            self.lost += 1
        except (ValueError, LookupError):
            self.wrong += 1
        finally:
            if writer:
                writer.close()


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server's process takes."""

    seconds: float
    rss_mib: float
    threads: int
    files: int

    @classmethod
    def of(cls, process: psutil.Process, began: float) -> "Sample":
        with process.oneshot():
            rss = process.memory_info().rss / 2**20
            return cls(time.perf_counter() - began, rss, process.num_threads(), process.num_fds())


def counted(url: str) -> Counter[int]:
    """Responses to `/v1/systemone` by status, as the server counts them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found: Counter[int] = Counter()
    for family in families:
        for sample in family.samples:
            if sample.name == "blink_requests_total" and sample.labels["path"] == "/v1/systemone":
                found[int(sample.labels["status"])] += int(sample.value)
    return found


def counted_otherwise(url: str, before: Counter[int], seen: Counter[int], seconds: float = 5.0) -> int:
    """How many responses the server has counted since then that clients did not see, or the reverse."""
    deadline = time.perf_counter() + seconds  # it counts a response after its last byte
    while True:
        served = counted(url) - before
        if served == seen or time.perf_counter() > deadline:
            return ((served - seen) + (seen - served)).total()
        time.sleep(0.2)


def at_rest(process: psutil.Process, until: Callable[[Sample], bool], seconds: float = 10.0) -> Sample:
    """What the process takes once `until` says that it has settled, or after a while in any case."""
    began = time.perf_counter()
    while not until(sample := Sample.of(process, began)) and sample.seconds < seconds:
        time.sleep(0.2)
    return sample


async def _watch(process: psutil.Process, seconds: float, every: float) -> list[Sample]:
    samples: list[Sample] = []
    began = time.perf_counter()
    with tqdm(total=round(seconds), desc="soak", unit="s", disable=None) as bar:
        while time.perf_counter() < began + seconds:
            await asyncio.sleep(every)
            samples.append(Sample.of(process, began))
            bar.update(round(samples[-1].seconds) - bar.n)
    return samples


async def _soak(clients: Clients, process: psutil.Process, number: int, seconds: float, every: float) -> list[Sample]:
    stop = time.perf_counter() + seconds
    async with asyncio.TaskGroup() as tasks:
        for seed in range(number):
            tasks.create_task(clients.closed_loop(random.Random(seed), stop))
        return await _watch(process, seconds, every)


def _medians(samples: list[Sample], length: float) -> list[Sample]:
    """The median of every stretch of `length` seconds that is whole."""
    whole = int(samples[-1].seconds / length)
    stretches = [[sample for sample in samples if int(sample.seconds / length) == i] for i in range(whole)]
    return [
        Sample(i * length, *(statistics.median(getattr(one, name) for one in part) for name in Sample.__slots__[1:]))
        for i, part in enumerate(stretches)
    ]


def soak(clients: Clients, url: str, process: psutil.Process, number: int, seconds: float) -> dict[str, Any]:
    """`number` clients for `seconds`; memory is compared between the second and the last minute, or tenth."""
    asyncio.run(clients.ask_alone())
    before = at_rest(process, lambda sample: sample.seconds > 1)
    served = counted(url)
    stretch = min(60.0, seconds / 10)
    samples = asyncio.run(_soak(clients, process, number, seconds, min(1.0, stretch / 4)))
    after = at_rest(process, lambda sample: sample.threads <= before.threads and sample.files <= before.files)
    medians = _medians(samples, stretch)
    first, last = medians[1], medians[-1]
    return {
        "clients": number,
        "seconds": seconds,
        "answers": clients.statuses.total(),
        "by_status": {str(status): n for status, n in sorted(clients.statuses.items())},
        "wrong": clients.wrong,
        "lost": clients.lost,
        "counted_otherwise": counted_otherwise(url, served, clients.statuses),
        "decisions_per_s": round(len(clients.answered_ms) / seconds, 1),
        "p50_ms": round(percentile(clients.answered_ms, 0.5)),
        "p99_ms": round(percentile(clients.answered_ms, 0.99)),
        "rss_mib": [round(one.rss_mib) for one in medians],
        "rss_growth": round(last.rss_mib / first.rss_mib - 1, 4),
        "rss_mib_at_rest": [round(before.rss_mib), round(after.rss_mib)],
        "threads": [first.threads, last.threads],
        "files": [first.files, last.files],
        "threads_at_rest": [before.threads, after.threads],
        "files_at_rest": [before.files, after.files],
    }


def overload(clients: Clients, url: str, rate: float, seconds: float, queued: int = QUEUED) -> dict[str, Any]:
    """Requests at `rate` a second for `seconds`, to a server whose queue and passes take `queued` requests.

    Who is taken last waits for a pass that has just begun, then for its own: twice a full queue's worth at the rate
    that the server answers meanwhile, times `UNEVEN`.
    """
    served = counted(url)
    began = time.perf_counter()
    requests = asyncio.run(clients.open_loop(rate, seconds))
    answered_per_s = len(clients.answered_ms) / (time.perf_counter() - began)
    return {
        "rate": round(rate, 1),
        "seconds": seconds,
        "requests": requests,
        "answered": len(clients.answered_ms),
        "refused": len(clients.refused_ms),
        "wrong": clients.wrong,
        "lost": clients.lost,
        "counted_otherwise": counted_otherwise(url, served, clients.statuses),
        "answered_p50_ms": round(percentile(clients.answered_ms, 0.5)),
        "answered_p99_ms": round(percentile(clients.answered_ms, 0.99)),
        "answered_per_s": round(answered_per_s, 1),
        "answered_bound_ms": round(1e3 * 2 * queued / answered_per_s * UNEVEN) if answered_per_s else 0,
        "refused_p50_ms": round(percentile(clients.refused_ms, 0.5), 1),
        "refused_p99_ms": round(percentile(clients.refused_ms, 0.99), 1),
        "refused_max_ms": round(max(clients.refused_ms, default=0.0), 1),
    }


def failures(report: dict[str, Any]) -> list[str]:
    """The bounds that were passed."""
    found = [
        f"{part}: {report[part][what]} {what}"
        for part in ("soak", "overload")
        for what in ("wrong", "lost", "counted_otherwise")
        if report.get(part, {}).get(what)
    ]
    long = report["soak"]
    if long["rss_growth"] > GROWTH:
        found.append(f"soak: memory grew by {long['rss_growth']:.1%}")
    for what in ("threads", "files", "threads_at_rest", "files_at_rest"):
        first, last = long[what]
        if last > first + MORE:
            found.append(f"soak: {what} grew from {first} to {last}")
    if over := report.get("overload"):
        if over["answered"] + over["refused"] != over["requests"] or not over["answered"] or not over["refused"]:
            found.append("overload: some requests should be answered, all others refused")
        if over["answered_p99_ms"] > over["answered_bound_ms"]:
            found.append(f"overload: what was taken took {over['answered_p99_ms']} ms")
        if over["refused_p99_ms"] > REFUSED_MS:
            found.append(f"overload: a refusal took {over['refused_p99_ms']} ms")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder, or mini")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--overload-s", type=float, default=30, help="seconds of too many requests; 0 leaves it out")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    random.seed(7)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--port", str(port), "--continuous", "--max-queued-requests", str(QUEUED), "--log-level", "warning"]
    server = subprocess.Popen([sys.executable, "serve.py", "--model", args.model, *flags])
    try:
        facts = wait_ready(url)
        clients = Clients("127.0.0.1", port, payloads())
        named = {name: facts[name] for name in ("model", "device", "dtype", "engine")}
        report: dict[str, Any] = {
            "command": " ".join(["python -m bench.soak", *sys.argv[1:]]),
            **versions(),
            "cpus": os.cpu_count(),
            **named,
        }
        report["soak"] = soak(clients, url, psutil.Process(server.pid), args.clients, 60 * args.minutes)
        if args.overload_s:
            again = Clients(clients.host, clients.port, clients.payloads, clients.expected)
            report["overload"] = overload(again, url, OVER * report["soak"]["decisions_per_s"], args.overload_s)
    finally:
        server.terminate()
        server.wait(60)
    report["failed"] = failures(report)
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
