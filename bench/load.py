"""A light HTTP load on `/v1/systemone`: each client sends its next request when it has the answer to the last."""

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

MakeBody = Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Row:
    """What a load measured: latencies in milliseconds from the first byte sent to the last received, of the requests
    sent in the measured time; requests_per_s: answers received in it, by its length.
    """

    workload: str
    clients: int
    requests: int
    errors: int
    p50_ms: float
    p95_ms: float
    max_ms: float
    requests_per_s: float
    input_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> tuple[int, bytes]:
    """Post a request over an open connection; its status and answer."""
    head = f"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(answer.split(b"content-length:")[1].split(b"\r\n")[0])
    return int(answer.split(b" ")[1]), await reader.readexactly(length)


async def _client(
    url: str, make: MakeBody, start: float, stop: float, seen: list[float], tally: dict[str, int]
) -> None:
    """Requests sent before `start` only warm up; at least one is sent after it, however slow the server is."""
    target = urlsplit(url)
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    measured = 0
    while time.perf_counter() < stop or not measured:
        body = make()
        sent = time.perf_counter()
        status, answer = await ask(reader, writer, body)
        received = time.perf_counter()
        tally["in_time"] += status == 200 and start <= received < stop
        if sent < start:
            continue
        measured += 1
        if status == 200:
            seen.append((received - sent) * 1e3)
            tally["tokens"] += json.loads(answer)["usage"]["input_tokens"]
        else:
            tally["errors"] += 1
    writer.close()


async def _run(
    url: str, make: MakeBody, clients: int, seconds: float, warm_up: float
) -> tuple[list[float], dict[str, int]]:
    start = time.perf_counter() + warm_up
    seen: list[float] = []
    tally = {"tokens": 0, "errors": 0, "in_time": 0}
    await asyncio.gather(*(_client(url, make, start, start + seconds, seen, tally) for _ in range(clients)))
    return sorted(seen), tally


def run(url: str, workload: str, make: MakeBody, clients: int, seconds: float, warm_up: float = 2.0) -> Row:
    """Load a server on this machine for `seconds` after `warm_up`; `make` draws each request anew."""
    seen, tally = asyncio.run(_run(url, make, clients, seconds, warm_up))
    n = len(seen)
    if not n:
        raise SystemExit(f"{workload}: no request was answered in {seconds} s")
    return Row(
        workload=workload,
        clients=clients,
        requests=n,
        errors=tally["errors"],
        p50_ms=round(seen[n // 2], 2),
        p95_ms=round(seen[min(n - 1, int(n * 0.95))], 2),
        max_ms=round(seen[-1], 2),
        requests_per_s=round(tally["in_time"] / seconds, 2),
        input_tokens=tally["tokens"] // n,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_ready(url: str, seconds: float = 600.0) -> dict[str, Any]:
    """The facts of `/healthz` once it answers 200."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=5) as answer:
                facts: dict[str, Any] = json.load(answer)
                return facts
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"{url} was not ready in {seconds:.0f} s")
