"""A long load on a real server, with every answer checked, and then more load than it can take.

    python -m bench.soak --model FOLDER --minutes 10 --json soak.json

First `--clients` clients send valid and invalid requests, some over kept connections and some over new ones. Every
answer must be the one that the server gave when it was asked alone (probabilities to 1e-4: company changes roundings).
Then requests arrive at four times the rate that the server sustained: those it takes must be answered, the others must
be told 503 with Retry-After. Ends with status 1 if an answer is wrong or lost, or memory, threads or file descriptors
grow.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.load import free_port, wait_ready
from bench.serving import body

GROWTH = 0.03  # of the resident memory, from the first minute to the end
MORE = 4  # threads or files that may come and go with connections
AROUND = 5  # samples of which the first and the last figures are the medians
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

Answer = tuple[int, dict[str, str], Any]


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes) -> Answer:
    """Post a request over an open connection: status, headers in lower case, body."""
    writer.write(f"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n\r\n".encode())
    writer.write(payload)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    return int(head[0].split(" ")[1]), headers, json.loads(await reader.readexactly(int(headers["content-length"])))


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
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else math.nan


@dataclass(slots=True)
class Soak:
    """What the clients saw and what the process took."""

    host: str
    port: int
    payloads: list[bytes]
    expected: list[Answer] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    wrong: int = 0
    lost: int = 0
    samples: list[dict[str, float]] = field(default_factory=list)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    async def ask_alone(self) -> None:
        reader, writer = await self.open()
        for payload in self.payloads:
            self.expected.append(await exchange(reader, writer, payload))
        writer.close()

    async def client(self, draw: random.Random, stop: float) -> None:
        reader, writer = await self.open()
        while time.perf_counter() < stop:
            if draw.random() < NEW_CONNECTION:
                writer.close()
                reader, writer = await self.open()
            at = draw.randrange(len(self.payloads))
            sent = time.perf_counter()
            try:
                status, _, answer = await exchange(reader, writer, self.payloads[at])
            except (OSError, asyncio.IncompleteReadError):
                self.lost += 1
                reader, writer = await self.open()
                continue
            self.statuses[status] = self.statuses.get(status, 0) + 1
            self.wrong += status != self.expected[at][0] or not same(self.expected[at][2], answer)
            if status == 200:
                self.milliseconds.append((time.perf_counter() - sent) * 1e3)
        writer.close()

    async def watch(self, process: psutil.Process, stop: float, every: float = 5.0) -> None:
        began = time.perf_counter()
        while time.perf_counter() < stop:
            await asyncio.sleep(every)
            with process.oneshot():
                sample = {
                    "seconds": round(time.perf_counter() - began, 1),
                    "rss_mib": round(process.memory_info().rss / 2**20, 1),
                    "threads": process.num_threads(),
                    "files": process.num_fds(),
                }
            self.samples.append(sample)

    async def run(self, process: psutil.Process, clients: int, seconds: float) -> None:
        await self.ask_alone()
        stop = time.perf_counter() + seconds
        draws = [random.Random(seed) for seed in range(clients)]
        await asyncio.gather(self.watch(process, stop), *(self.client(draw, stop) for draw in draws))

    def report(self, seconds: float) -> dict[str, Any]:
        settled = [sample for sample in self.samples if sample["seconds"] >= min(60.0, seconds / 3)]
        first, last = (
            {name: statistics.median(sample[name] for sample in part) for name in settled[0]}
            for part in (settled[:AROUND], settled[-AROUND:])
        )
        return {
            "seconds": seconds,
            "answers": sum(self.statuses.values()),
            "by_status": {str(status): n for status, n in sorted(self.statuses.items())},
            "wrong": self.wrong,
            "lost": self.lost,
            "requests_per_s": round(len(self.milliseconds) / seconds, 1),
            "p50_ms": round(percentile(self.milliseconds, 0.5), 1),
            "p99_ms": round(percentile(self.milliseconds, 0.99), 1),
            "rss_mib": [first["rss_mib"], last["rss_mib"]],
            "rss_growth": round(last["rss_mib"] / first["rss_mib"] - 1, 4),
            "threads": [first["threads"], last["threads"]],
            "files": [first["files"], last["files"]],
        }


async def overload(soak: Soak, rate: float, seconds: float) -> dict[str, Any]:
    """Requests at `rate` a second, each over a connection of its own, whatever became of the ones before."""
    taken: list[float] = []
    refused: list[float] = []
    bad = lost = 0
    valid = [at for at, answer in enumerate(soak.expected) if answer[0] == 200]

    async def one(at: int) -> None:
        nonlocal bad, lost
        try:
            reader, writer = await soak.open()
            sent = time.perf_counter()
            status, headers, answer = await exchange(reader, writer, soak.payloads[at])
        except (OSError, asyncio.IncompleteReadError):
            lost += 1
            return
        took = (time.perf_counter() - sent) * 1e3
        writer.close()
        if status == 200 and same(soak.expected[at][2], answer):
            taken.append(took)
        elif status == 503 and "retry-after" in headers:
            refused.append(took)
        else:
            bad += 1

    tasks = []
    began = time.perf_counter()
    for n in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + n / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one(valid[n % len(valid)])))
    await asyncio.gather(*tasks)
    return {
        "seconds": seconds,
        "sent": len(tasks),
        "answered": len(taken),
        "refused": len(refused),
        "wrong": bad,
        "lost": lost,
        "answered_p99_ms": round(percentile(taken, 0.99), 1),
        "refused_p50_ms": round(percentile(refused, 0.5), 1),
        "refused_p99_ms": round(percentile(refused, 0.99), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder, or mini")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--overload-s", type=float, default=20, help="seconds of too many requests; 0 leaves it out")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    random.seed(7)
    payloads = [body(kind) for kind in ("short", "six", "one", "eight") for _ in range(8)] + list(INVALID)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "serve.py", "--model", args.model, "--port", str(port), "--continuous"]
    server = subprocess.Popen([*command, "--log-level", "warning"])
    try:
        wait_ready(url)
        target = urlsplit(url)
        soak = Soak(str(target.hostname), port, payloads)
        asyncio.run(soak.run(psutil.Process(server.pid), args.clients, 60 * args.minutes))
        report: dict[str, Any] = {"command": " ".join(sys.argv[1:]), "soak": soak.report(60 * args.minutes)}
        print(json.dumps(report["soak"], indent=1), flush=True)
        if args.overload_s:
            rate = 4 * report["soak"]["requests_per_s"]
            report["overload"] = {"rate": rate} | asyncio.run(overload(soak, rate, args.overload_s))
            print(json.dumps(report["overload"], indent=1), flush=True)
    finally:
        server.terminate()
        server.wait(60)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    found = report["soak"]
    grown = found["rss_growth"] > GROWTH or any(
        last > first + MORE for first, last in (found["threads"], found["files"])
    )
    failed = [part for part in report.values() if isinstance(part, dict) and (part["wrong"] or part["lost"])]
    return 1 if failed or grown else 0


if __name__ == "__main__":
    sys.exit(main())
