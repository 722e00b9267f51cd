"""What a request costs beside the model: HTTP, wire, rendering, tokenizing, queue and answer.

Runs the real server in a process of its own with an engine that scores every label alike in no time, and loads it
over loopback. Run: python -m bench.overhead --model FOLDER (its tokenizer is used, its weights are not read).
"""

import argparse
import json
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from answers import Temperatures
from bench.load import free_port, run, wait_ready

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

    temperatures = Temperatures()
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
    from keys import Keys
    from service import Service

    args = serve.parse_args(["--model", str(folder), "--port", str(port), "--continuous", "--log-level", "error"])
    service = Service(
        name="instant",
        keys=Keys(),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder whose tokenizer is used")
    parser.add_argument("--seconds", type=float, default=5, help="of each row")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve_instant(args.model, args.serve)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.overhead", "--model", str(args.model), "--serve", str(port)]
    )
    try:
        wait_ready(url)
        random.seed(7)
        print(f"Python {platform.python_version()}, {platform.machine()}, engine time taken out")
        print(f"{'workload':10}{'clients':>8}{'p50 ms':>9}{'p95 ms':>9}{'requests/s':>12}")
        rows = []
        for kind, clients in RUNS:
            row = run(url, kind, partial(body, kind), clients, args.seconds, warm_up=1.0)
            rows.append(row.as_dict())
            print(f"{kind:10}{clients:8}{row.p50_ms:9.2f}{row.p95_ms:9.2f}{row.requests_per_s:12.0f}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    finally:
        server.terminate()
        server.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
