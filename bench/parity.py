"""The fast pass and transformers in bf16, each against transformers in float32 on the same weights and prompts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5 as published

from qwen35 import Forked, Qwen35Engine

ROOT = tuple(range(1000, 1041))
"""The server's prompts all begin alike; here nine in ten requests do."""
FIRST_LABEL = 32  # the id of "A" in the published vocabulary; random weights do not care


def questions(count: int, vocabulary: int, seed: int) -> tuple[list[Forked], list[int]]:
    """At least `count` questions of mixed shapes, and how many options each has."""
    draw = np.random.default_rng(seed)
    ids: Callable[[int], list[int]] = lambda n: draw.integers(0, vocabulary, n).tolist()  # noqa: E731
    requests: list[Forked] = []
    options: list[int] = []
    while len(options) < count:
        prefix = int(draw.choice([0, 40, 64, 150, 190, 256, 500, 650, 1500]))
        tails = int(draw.choice([1, 1, 2, 3, 6, 16]))
        begin = ROOT if draw.random() < 0.9 else ()
        requests.append(Forked([*begin, *ids(prefix)], [ids(int(n)) for n in draw.integers(1, 110, tails)]))
        options += [int(n) for n in draw.choice([2, 3, 4, 5, 10, 26, 200], tails)]
    return requests, options


def probabilities(hidden: Tensor, rows: Tensor, options: Sequence[int]) -> list[Tensor]:
    """Each question's distribution over its first labels, from float32 products."""
    logits = hidden.float() @ rows.T
    return [line[:n].softmax(-1) for line, n in zip(logits, options, strict=True)]


@torch.inference_mode()
def whole_prompts(folder: Path, device: torch.device, dtype: torch.dtype, requests: Sequence[Forked]) -> Tensor:
    """Hidden states of each question's whole prompt through transformers, one prompt a pass, [questions, hidden]."""
    model: Any = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    states = []
    for one in tqdm(requests, desc=f"transformers {dtype}"):
        for tail in one.tails:
            prompt = torch.tensor([[*one.prefix, *tail]], device=device)
            states.append(model.model(prompt, use_cache=False).last_hidden_state[0, -1].clone())
    return torch.stack(states)


def compare(ours: list[Tensor], truth: list[Tensor]) -> dict[str, float]:
    """Argmax agreement and the largest |dp| of each question, as p99 and maximum over questions."""
    worst = torch.stack([(a - b).abs().max() for a, b in zip(ours, truth, strict=True)]).double().cpu()
    agree = torch.stack([a.argmax() == b.argmax() for a, b in zip(ours, truth, strict=True)]).double().mean()
    return {
        "argmax_agreement": round(float(agree), 5),
        "p50_dp": round(float(worst.quantile(0.5)), 6),
        "p99_dp": round(float(worst.quantile(0.99)), 6),
        "max_dp": round(float(worst.max()), 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.backends.cuda.matmul.allow_tf32 = False

    engine = Qwen35Engine(given.folder, device)
    engine.keep_root(ROOT)
    engine.warm_up(None)
    requests, options = questions(given.questions, engine.geometry.vocabulary, given.seed)
    rows = engine.head_rows(range(FIRST_LABEL, FIRST_LABEL + 200))
    read = lambda states: probabilities(states, rows, options)  # noqa: E731
    company = engine.hidden(requests)
    alone = torch.cat([engine.hidden([one]) for one in tqdm(requests, desc="fast pass, one by one")])
    again = torch.cat([engine.hidden([one]) for one in requests])
    del engine
    torch.cuda.empty_cache()

    plain = read(whole_prompts(given.folder, device, torch.bfloat16, requests))
    torch.cuda.empty_cache()
    # fla's kernels multiply in TF32 even for float32 inputs; the reference must not.
    fused = published.torch_chunk_gated_delta_rule
    published.torch_chunk_gated_delta_rule = getattr(fused, "__wrapped__", fused)
    truth = read(whole_prompts(given.folder, device, torch.float32, requests))
    fast = read(alone)
    report = {
        "questions": len(options),
        "fast, one by one": compare(fast, truth),
        "fast, all together": compare(read(company), truth),
        "transformers bf16": compare(plain, truth),
        "fast alone against together": compare(fast, read(company)),
        "fast against transformers bf16": compare(fast, plain),
        "repeat identical": bool((alone == again).all()),
    }
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))
    for name, figures in report.items():
        print(f"{name:32}", figures)


if __name__ == "__main__":
    main()
