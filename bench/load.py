"""A light HTTP load on `/v1/systemone`: each client sends its next request when it has the answer to the last."""

import asyncio
import json
import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

MakeBody = Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Row:
    """What a load measured: latencies in milliseconds from the first byte sent to the last received, of the requests
    sent in the measured time; requests_per_s: answers received in it, by the time up to the last of them.
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


@dataclass(slots=True)
class _Load:
    """A load under way. It is measured once it has lasted `warm_up` seconds and every client has had an answer.

    Against a slow server it is measured for longer than `seconds`, so that every client gets one answer at least.
    """

    clients: int
    seconds: float
    warm_up: float
    began: float = field(default_factory=time.perf_counter)
    warm: int = 0  # clients that have had an answer
    start: float = math.inf
    latencies: list[float] = field(default_factory=list)
    errors: int = 0
    tokens: int = 0
    in_time: int = 0  # answers received in the measured time
    last: float = 0.0  # when the last of them came

    async def client(self, url: str, make: MakeBody) -> None:
        target = urlsplit(url)
        reader, writer = await asyncio.open_connection(target.hostname, target.port)
        requests = 0
        while time.perf_counter() < self.start + self.seconds:
            body = make()
            sent = time.perf_counter()
            status, answer = await ask(reader, writer, body)
            received = time.perf_counter()
            requests += 1
            self.warm += requests == 1
            if self.start == math.inf and self.warm == self.clients and received >= self.began + self.warm_up:
                self.start = received
                self.seconds = max(self.seconds, 1.2 * (received - sent))
            elif status == 200 and self.start <= received < self.start + self.seconds:
                self.in_time += 1
                self.last = received
            if sent < self.start:
                continue
            if status == 200:
                self.latencies.append((received - sent) * 1e3)
                self.tokens += json.loads(answer)["usage"]["input_tokens"]
            else:
                self.errors += 1
        writer.close()

    async def run(self, url: str, make: MakeBody) -> None:
        await asyncio.gather(*(self.client(url, make) for _ in range(self.clients)))


def run(url: str, workload: str, make: MakeBody, clients: int, seconds: float, warm_up: float = 2.0) -> Row:
    """Load a server on this machine for `seconds` after `warm_up`; `make` draws each request anew."""
    load = _Load(clients, seconds, warm_up)
    asyncio.run(load.run(url, make))
    seen, n = sorted(load.latencies), len(load.latencies)
    if not n:
        raise SystemExit(f"{workload}: no request was answered in {seconds} s")
    return Row(
        workload=workload,
        clients=clients,
        requests=n,
        errors=load.errors,
        p50_ms=round(seen[n // 2], 2),
        p95_ms=round(seen[min(n - 1, int(n * 0.95))], 2),
        max_ms=round(seen[-1], 2),
        requests_per_s=round(load.in_time / (load.last - load.start), 2),
        input_tokens=load.tokens // n,
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
