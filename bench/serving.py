"""Latency and throughput over HTTP: the packed pass, the plain engine beside it, or any other server.

    python -m bench.serving --model FOLDER --plain --json results.json --plot latency.png
    python -m bench.serving --url http://127.0.0.1:8001

Every request carries new random words, so no cache of earlier answers can help.

workload   questions  tokens of a request when its state is read once (about, on the Qwen3.5 vocabulary)
short      2          215     one choice of 3, one yes/no
jevbench   1          700     one choice of 4
six        6          660     two each of choice, yes/no, score
doc16      16         8,800   sixteen questions on one long document
one        1          235     one yes/no on 150 tokens
eight      8          850     eight yes/no on 500 tokens
"""

import argparse
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from bench.load import Row, free_port, run, wait_ready

WORDS = ["order", "customer", "screen", "cracked", "invoice", "refund", "delay", "shipment", "router", "update"]
WORDS += ["account", "billing", "policy", "agent", "review", "evidence", "section", "result", "method", "report"]
ALONE = ("short", "jevbench", "six", "doc16")
CROWDS = (("jevbench", 16), ("six", 64), ("short", 64), ("doc16", 4))
LADDER = (1, 2, 4, 8, 16, 32, 64)
STATE_WORDS = {"short": 40, "jevbench": 560, "six": 150, "doc16": 7500, "one": 140, "eight": 480}


def words(n: int) -> str:
    return " ".join(random.choices(WORDS, k=n))


def choice(options: int) -> dict[str, Any]:
    criteria = {f"team_{i}": f"Handles {words(4)}" for i in range(options)}
    return {"type": "choice", "instructions": "Which team should handle this case?", "criteria": criteria}


def noul() -> dict[str, Any]:
    return {"type": "noul", "instructions": f"Does this need a reply today? {words(3)}"}


def score() -> dict[str, Any]:
    return {
        "type": "score",
        "instructions": "How urgent is this?",
        "criteria": ["can wait", "this week", "today", "now"],
    }


def body(workload: str) -> bytes:
    """A request of this kind, drawn anew."""
    mixed = {"six": 6, "doc16": 16}
    if workload in mixed:
        asked = [(choice(4), noul(), score())[i % 3] for i in range(mixed[workload])]
    elif workload == "eight":
        asked = [noul() for _ in range(8)]
    else:
        asked = {"short": [choice(3), noul()], "jevbench": [choice(4)], "one": [noul()]}[workload]
    questions = {f"q{i}": question for i, question in enumerate(asked)}
    return json.dumps({"model": "jev-latest", "state": words(STATE_WORDS[workload]), "questions": questions}).encode()


def sized(state_words: int) -> bytes:
    question = {"q": noul()}
    return json.dumps({"model": "jev-latest", "state": words(state_words), "questions": question}).encode()


def stalls(url: str, requests: int = 200) -> dict[str, Any]:
    """Requests of random sizes one after the other: the slowest against the median of those about its size."""
    sizes = [int(10 ** random.uniform(0, 3.5)) for _ in range(requests)]
    timed = [(size, run_once(url, sized(size))[0]) for size in sizes]
    worst = 0.0
    for size, milliseconds in timed:
        near = [ms for other, ms in timed if 0.8 <= (other + 100) / (size + 100) <= 1.25]
        worst = max(worst, milliseconds / statistics.median(near))
    return {"requests": requests, "worst_to_median": round(worst, 2), "max_ms": round(max(ms for _, ms in timed), 1)}


def longest(server: "Server", state_words: int = 120_000) -> dict[str, Any]:
    """Three questions about a state near the context's end: tokens, milliseconds, device memory after it in GiB."""
    questions = {f"q{i}": question for i, question in enumerate((choice(4), noul(), score()))}
    payload = {"model": "jev-latest", "state": words(state_words), "questions": questions}
    milliseconds, answer = run_once(server.url, json.dumps(payload).encode())
    return {"input_tokens": answer["usage"]["input_tokens"], "ms": round(milliseconds), "gib": server.memory()}


def run_once(url: str, payload: bytes) -> tuple[float, Any]:
    """Milliseconds of one request over a connection of its own, and its answer."""
    request = urllib.request.Request(f"{url}/v1/systemone", data=payload)
    sent = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        body = answer.read()
    return (time.perf_counter() - sent) * 1e3, json.loads(body)


class Server:
    """`serve.py` as a process of its own; `ready_s` from process start to the first answer of a decision."""

    def __init__(self, model: Path, flags: list[str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "serve.py", "--model", str(model), "--port", str(port), "--log-level", "warning", *flags]
        )
        self.facts = wait_ready(self.url)
        run_once(self.url, sized(20))
        self.ready_s = round(time.perf_counter() - started, 1)

    def __enter__(self) -> "Server":
        return self

    def memory(self) -> dict[str, float]:
        """GiB of device memory by kind, as `/metrics` tells."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        kinds = re.findall(r'^blink_device_memory_bytes\{kind="(\w+)"\} (\S+)', text, re.MULTILINE)
        return {kind: round(float(size) / 2**30, 2) for kind, size in kinds}

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(60)


def measure(url: str, runs: list[tuple[str, int]], seconds: float, label: str) -> list[dict[str, Any]]:
    rows = []
    for workload, clients in runs:
        row = run(url, workload, partial(body, workload), clients, seconds)
        show(label, row)
        rows.append(row.as_dict() | {"server": label})
    return rows


def show(label: str, row: Row) -> None:
    print(
        f"{label:12}{row.workload:10}{row.clients:8}{row.requests:9}{row.errors:7}{row.p50_ms:10.1f}{row.p95_ms:10.1f}"
        f"{row.max_ms:10.1f}{row.requests_per_s:12.1f}{row.input_tokens:8}",
        flush=True,
    )


def plot(rows: list[dict[str, Any]], to: Path) -> None:
    """Latency against load: p50 and p95 of jevbench by requests per second, each point a number of clients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for label in dict.fromkeys(row["server"] for row in rows):
        own = [row for row in rows if row["server"] == label]
        for measure_name, style in (("p50_ms", "o-"), ("p95_ms", "o--")):
            axes.plot(
                [row["requests_per_s"] for row in own],
                [row[measure_name] for row in own],
                style,
                label=f"{label}, {measure_name.removesuffix('_ms')}",
            )
        for row in own:
            at = (row["requests_per_s"], row["p50_ms"])
            axes.annotate(str(row["clients"]), at, xytext=(6, -10), textcoords="offset points", fontsize=8)
    axes.set(xlabel="requests/s of jevbench; the numbers are clients", ylabel="latency, ms", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(to, dpi=120)


def versions() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": gpu,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="folder to serve with serve.py, at first alone, then --continuous")
    source.add_argument("--url", help="a server that runs already on this machine")
    parser.add_argument("--plain", action="store_true", help="with --model: also the reference engine, in the same run")
    parser.add_argument("--seconds", type=float, default=7, help="of each row")
    parser.add_argument("--only", default="", help="workloads to run, with commas")
    parser.add_argument(
        "--ladder", action="store_true", help="also jevbench at 1 to 64 clients (not --plain), for the plot"
    )
    parser.add_argument(
        "--stalls", action="store_true", help="also 200 requests of random sizes right after start (not --plain)"
    )
    parser.add_argument(
        "--longest", action="store_true", help="also a state of 120,000 words with three questions (not --plain)"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="write latency against load here, needs --ladder and matplotlib")
    args = parser.parse_args()
    random.seed(7)
    only = args.only.split(",") if args.only else []
    alone = [(kind, 1) for kind in (only or ALONE)]
    crowds = [(kind, clients) for kind, clients in CROWDS if not only or kind in only]
    ladder: list[tuple[str, int]] = [("jevbench", clients) for clients in LADDER] if args.ladder else []
    report: dict[str, Any] = {"command": " ".join(sys.argv), **versions(), "servers": [], "rows": [], "ladder": []}
    header = f"{'server':12}{'workload':10}{'clients':>8}{'requests':>9}{'errors':>7}{'p50 ms':>10}{'p95 ms':>10}"
    print(f"{header}{'max ms':>10}{'requests/s':>12}{'tokens':>8}")

    def add(url: str, runs: list[tuple[str, int]], label: str, to: str = "rows") -> None:
        report[to] += measure(url, runs, args.seconds, label)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))

    if args.url:
        add(args.url, alone + crowds, "url")
        add(args.url, ladder, "url", "ladder")
    else:
        engines = [("blink", [])] + ([("plain", ["--engine", "reference"])] if args.plain else [])
        for label, flags in engines:
            with Server(args.model, flags) as server:
                figures = {"server": label, "ready_s": server.ready_s, "at_rest_gib": server.memory()}
                report["servers"].append(figures | {"facts": server.facts})
                print(f"{figures} {server.facts['engine']}", flush=True)
                if args.stalls and label == "blink":
                    report["servers"][-1]["stalls"] = stalls(server.url)
                    print(f"{label}: {report['servers'][-1]['stalls']}", flush=True)
                add(server.url, alone, label)
                if args.longest and label == "blink":
                    report["servers"][-1]["longest"] = longest(server)
                    print(f"{label}: {report['servers'][-1]['longest']}", flush=True)
            with Server(args.model, [*flags, "--continuous"]) as server:
                add(server.url, crowds, label)
                add(server.url, ladder if label == "blink" else [], label, "ladder")
    if args.plot:
        plot(report["ladder"], args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
