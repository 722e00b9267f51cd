"""Milliseconds and tokens a second of the fast pass by shape of request, beside the product floor of the GPU."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from qwen35 import Forked, Qwen35Engine

SHAPES: dict[str, tuple[int, list[int]]] = {
    "short": (135, [40, 40]),
    "jevbench": (650, [57]),
    "six": (231, [72, 71, 72, 71, 72, 72]),
    "doc16": (7_927, [55] * 16),
}
"""Tokens of the state and of each question, as the serving workloads of the same names have them."""
ROOT = tuple(range(1000, 1041))
"""Every request of the server begins with these many tokens: the system message and the opening of the user's."""
BATCHES = {"short": 64, "jevbench": 16, "six": 64, "doc16": 4}
"""Requests that wait together in the throughput rows."""
WEIGHT_READ_MS = 1.6
PRODUCT_FLOPS = 680e12
"""One reading of the weights, and the rate of the large products, both as measured on an H200."""


def request(shape: str, seed: int, vocabulary: int) -> Forked:
    """A request of random token ids behind the root."""
    draw = np.random.default_rng(seed)
    prefix, tails = SHAPES[shape]
    return Forked(
        draw.integers(0, vocabulary, prefix).tolist(), [draw.integers(0, vocabulary, n).tolist() for n in tails]
    )


def floor_ms(engine: Qwen35Engine, tokens: int) -> float:
    """The larger of one reading of the weights and the products at the measured rate."""
    stacked = sum(
        matrix.numel()
        for layer in engine.weights.layers
        for matrix in (layer.project, layer.out, layer.gate_up, layer.down)
    )
    return max(WEIGHT_READ_MS, 2 * stacked * tokens / PRODUCT_FLOPS * 1e3)


def timed(engine: Qwen35Engine, batch: list[list[Forked]]) -> list[float]:
    """Milliseconds of each batch, from ids on the host to hidden states on the host."""
    times = []
    for requests in batch:
        start = time.perf_counter()
        engine.hidden(requests).float().cpu()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure(engine: Qwen35Engine, repeats: int, rooted: int) -> list[dict[str, Any]]:
    """One row per shape alone and per shape in company; rooted: tokens of the root that no pass reads again."""
    rows = []
    cases = [(shape, 1) for shape in SHAPES] + list(BATCHES.items())
    for shape, count in tqdm(cases, desc="shapes"):
        tokens = SHAPES[shape][0] + sum(SHAPES[shape][1])
        runs = repeats if count == 1 else max(3, repeats // 5)
        seeds = iter(range(10**6))
        batches = [
            [request(shape, next(seeds), engine.geometry.vocabulary) for _ in range(count)] for _ in range(runs + 3)
        ]
        times = sorted(timed(engine, batches)[3:])
        median = statistics.median(times)
        rows.append(
            {
                "shape": shape,
                "requests": count,
                "tokens": tokens * count,
                "ms": round(median, 2),
                "p95_ms": round(times[int(0.95 * (len(times) - 1))], 2),
                "requests_per_s": round(count / median * 1e3, 1),
                "tokens_per_s": round(tokens * count / median * 1e3),
                "floor_share": round(floor_ms(engine, (tokens - rooted) * count) / median, 3),
            }
        )
    return rows


def stalls(engine: Qwen35Engine, count: int) -> dict[str, Any]:
    """Requests of random sizes: how far the slowest is from its neighbours in size."""
    draw = np.random.default_rng(1)
    seen = []
    for seed in tqdm(range(count), desc="random sizes"):
        tails = draw.integers(1, 90, int(draw.integers(1, 12))).tolist()
        SHAPES["random"] = (int(draw.integers(0, 3000)), tails)
        (ms,) = timed(engine, [[request("random", seed, engine.geometry.vocabulary)]])
        seen.append((SHAPES["random"][0] + sum(tails), ms))
    del SHAPES["random"]
    seen.sort()
    worst = max(
        ms / statistics.median(other for _, other in seen[max(0, i - 7) : i + 8]) for i, (_, ms) in enumerate(seen)
    )
    return {"requests": count, "worst_over_median_of_its_size": round(worst, 2)}


def profile(engine: Qwen35Engine, shape: str) -> list[dict[str, Any]]:
    """Kernel times of one pass, the largest first."""
    one = [[request(shape, 5, engine.geometry.vocabulary)]]
    timed(engine, one)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        timed(engine, one)
    rows = [
        {"kernel": event.key[:90], "calls": event.count, "us": round(event.self_device_time_total, 1)}
        for event in seen.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned columns."""
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    lines = ["  ".join(key.rjust(width) for key, width in widths.items())]
    lines += ["  ".join(str(row[key]).rjust(width) for key, width in widths.items()) for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a model folder, see random_model.py")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=50, help="timed runs of each lone shape")
    parser.add_argument("--stalls", type=int, default=200, help="requests of random sizes after the warm-up; 0 skips")
    parser.add_argument("--profile", choices=SHAPES, help="also print the kernels of one pass of this shape")
    parser.add_argument("--token-budget", type=int, default=12_288)
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--no-root", action="store_true", help="read the ids that all requests begin with every time")
    given = parser.parse_args()

    device = torch.device(given.device)
    start = time.perf_counter()
    engine = Qwen35Engine(given.folder, device, token_budget=given.token_budget)
    loaded = time.perf_counter()
    if not given.no_root:
        engine.keep_root(ROOT)
    engine.warm_up(None)
    ready = time.perf_counter()
    at_rest = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "kernels": engine.kernels,
        "load_s": round(loaded - start, 1),
        "warm_up_s": round(ready - loaded, 1),
        "at_rest_gib": round(at_rest / 2**30, 2),
        "rows": measure(engine, given.repeats, 0 if given.no_root else len(ROOT)),
    }
    if given.stalls:
        report["stalls"] = stalls(engine, given.stalls)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    report["peak_gib"] = round(peak / 2**30, 2)
    if given.profile:
        report["profile"] = profile(engine, given.profile)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))
    print({key: value for key, value in report.items() if key not in ("rows", "profile")})
    if given.profile:
        print(table(report["profile"][:30]))
    print(table(report["rows"]))


if __name__ == "__main__":
    main()
