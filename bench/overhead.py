"""What a request costs beside the model: HTTP, wire, rendering, tokenizing, queue and answer.

Runs the real server in a process of its own with an engine that scores every label alike in no time, and loads it
over loopback. Run: python -m bench.overhead --model FOLDER (its tokenizer is used, its weights are not read).
"""

import argparse
import asyncio
import json
import platform
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = ["order", "customer", "screen", "cracked", "replacement", "invoice", "refund", "delay", "router", "update"]
RUNS = (("short", 1), ("short", 16), ("six", 1), ("six", 16), ("long", 1), ("long", 16))


def body(kind: str) -> bytes:
    """A request of two questions on 40 words, of six on 150, or of one on 4,000."""
    words, questions = {"short": (40, 2), "six": (150, 6), "long": (4000, 1)}[kind]
    forms: list[dict[str, Any]] = [
        {
            "type": "choice",
            "instructions": "Which team?",
            "criteria": {f"team_{i}": "Handles orders" for i in range(4)},
        },
        {"type": "noul", "instructions": "Does this need a reply today?"},
        {"type": "score", "instructions": "How urgent is this?", "criteria": ["can wait", "this week", "today", "now"]},
    ]
    state = " ".join(random.choices(WORDS, k=words))
    asked = {f"q{i}": forms[i % 3] for i in range(questions)}
    return json.dumps({"model": "jev-latest", "state": state, "questions": asked}).encode()


async def client(port: int, kind: str, stop: float, latencies: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < stop:
        payload = body(kind)
        head = f"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n\r\n"
        sent = time.perf_counter()
        writer.write(head.encode() + payload)
        answer_head = await reader.readuntil(b"\r\n\r\n")
        length = int(answer_head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        assert answer_head.startswith(b"HTTP/1.1 200"), answer_head
        latencies.append((time.perf_counter() - sent) * 1e3)
    writer.close()


async def load(port: int, kind: str, clients: int, seconds: float) -> dict[str, Any]:
    await asyncio.gather(*(client(port, kind, time.perf_counter() + 1.0, []) for _ in range(clients)))  # warm-up
    latencies: list[float] = []
    await asyncio.gather(*(client(port, kind, time.perf_counter() + seconds, latencies) for _ in range(clients)))
    latencies.sort()
    n = len(latencies)
    return {
        "workload": kind,
        "clients": clients,
        "p50_ms": round(latencies[n // 2], 2),
        "p95_ms": round(latencies[int(n * 0.95)], 2),
        "requests_per_s": round(n / seconds),
    }


@dataclass(slots=True, eq=False)
class InstantPass:
    """Both a job and the pass that finishes it: all its labels score alike."""

    counts: Sequence[int]
    left: int = 1
    jobs: Sequence[Any] = ()

    def wait(self) -> None: ...

    def outcomes(self) -> list[Any]:
        return [[[0.0] * count for count in job.counts] for job in self.jobs]


class InstantEngine:
    """Prepares requests as the real engine does and takes no time to score them."""

    temperature = 1.0
    token_budget = 1 << 20

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        from prompts import PromptEncoder

        self._encoder = PromptEncoder(AutoTokenizer.from_pretrained(folder))
        self.prepare = self._encoder.encode

    def open(self, prompts: Any) -> InstantPass:
        return InstantPass(prompts.counts)

    def step(self, jobs: Sequence[InstantPass]) -> InstantPass:
        return InstantPass((), jobs=jobs)


def serve_instant(folder: Path, port: int) -> int:
    import serve
    from batcher import Batcher

    args = serve.parse_args(["--model", str(folder), "--port", str(port), "--continuous", "--log-level", "error"])
    service = serve.Service(
        name="instant",
        api_key=None,
        max_body_bytes=args.max_body_bytes,
        max_connections=args.max_connections,
        request_timeout_s=args.request_timeout_s,
    )

    def start(on_death: Callable[[], None]) -> None:
        engine = InstantEngine(folder)
        service.decider = Batcher(engine, 0.0, 64, on_batch=service.metrics.on_batch, on_death=on_death)
        serve.settle()
        service.status = "ok"

    return serve.run(service, args, start)


def wait_ready(port: int) -> None:
    for _ in range(600):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
                probe.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                if probe.recv(64).startswith(b"HTTP/1.1 200"):
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder whose tokenizer is used")
    parser.add_argument("--seconds", type=float, default=5, help="of each row")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve_instant(args.model, args.serve)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.overhead", "--model", str(args.model), "--serve", str(port)]
    )
    try:
        wait_ready(port)
        random.seed(7)
        print(f"Python {platform.python_version()}, {platform.machine()}, engine time taken out")
        print(f"{'workload':10}{'clients':>8}{'p50 ms':>9}{'p95 ms':>9}{'requests/s':>12}")
        rows = []
        for kind, clients in RUNS:
            row = asyncio.run(load(port, kind, clients, args.seconds))
            rows.append(row)
            print(f"{kind:10}{clients:8}{row['p50_ms']:9.2f}{row['p95_ms']:9.2f}{row['requests_per_s']:12}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    finally:
        server.terminate()
        server.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
