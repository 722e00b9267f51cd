"""Train the built-in model and write its adapter.

    python -m mini.train --data FOLDER [--base FOLDER] [--out mini/adapter.safetensors]

The objective is the server's own readout: cross-entropy over the labels that a question offers, FP32 scores at the
last position of the prompt. Two stages share one cosine:

1. All linear weights of the layers learn. Binding an answer to its letter takes thousands of small steps, and low-rank
   factors trained from nothing did not get there in the same time.
2. What each weight has learnt is cut to its first singular directions, and these factors learn on. The weights in use
   stay `base + b @ a` in float32, rounded to bfloat16 for the products, which is what `build.py` makes of the adapter:
   the merged model is the trained one.

Embeddings, norms and the tied head stay the base's. At the end one temperature for each question type is fitted on
families that neither train nor test (`fit.jsonl.gz`) and stored with the adapter.
"""

import argparse
import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from answers import probabilities
from mini import build
from mini.batches import WIDTHS, Batch, Encoder, Stream, ordered
from mini.items import KINDS, Item, read_items
from mini.metrics import fitted_temperatures


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train; every field is a flag."""

    steps: int = 14_000
    minutes: float = 14.0  # the schedule ends then at the latest, whatever the steps
    tokens: int = 8192  # padded tokens of a batch
    rate: float = 3e-4  # of all weights
    factor_rate: float = 6e-4  # of the factors
    full: float = 0.6  # share of the schedule in which all weights learn
    rank: int = 64
    warmup: int = 300  # steps, in each stage
    decay: float = 0.0  # would pull towards zero, not towards the base
    clip: float = 1.0
    workers: int = 8
    record: int = 1  # 0: never record steps as CUDA graphs
    seed: int = 5
    checks: int = 8  # times that accuracy is looked at on the way
    check_items: int = 600  # of each file


class LowRank(nn.Module):
    """A weight with a low-rank change: W + b @ a in float32, whatever autocast says."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            return weight + self.b @ self.a


def load(folder: Path, device: torch.device) -> Any:
    """The model in float32, with only the linear weights of its layers learning."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.requires_grad_(False)
    for _, linear in linears(model):
        linear.weight.requires_grad_(True)
    return model.to(device).train()


def linears(model: Any) -> list[tuple[str, nn.Linear]]:
    """The linear maps of the layers, by the name of their weight."""
    layers = model.base_model.layers.named_modules(prefix="model.layers")
    return [(f"{name}.weight", module) for name, module in layers if isinstance(module, nn.Linear)]


def learning(model: Any) -> list[Tensor]:
    return [linear.weight for _, linear in linears(model)]


def label_logits(model: Any, labels: Tensor, batch: Batch) -> Tensor:
    """FP32 logits of the labels at each last position, [rows, OPTIONS]; very low where a row offers no option.

    The layers are called one by one: without a mask, and without a look at the data that would wait for the device.
    """
    body = model.base_model
    positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)[None]
    with torch.autocast(batch.ids.device.type, dtype=torch.bfloat16, cache_enabled=False):
        hidden = body.embed_tokens(batch.ids)
        rotary = body.rotary_emb(hidden, position_ids=positions)
        for layer in body.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        hidden = body.norm(hidden.take_along_dim(batch.last[:, None, None], dim=1)[:, 0])
    logits: Tensor = hidden.float() @ model.get_output_embeddings().weight[labels].float().T
    return logits.masked_fill(batch.target < 0, -1e9)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of the offered labels; targets may be soft."""
    return -(target.clamp(min=0) * logits.log_softmax(-1)).sum(-1).mean()


class Stepper:
    """Training steps. On CUDA the second batch of each width records the step, later ones replay it."""

    def __init__(self, model: Any, labels: Tensor, parameters: Sequence[Tensor], settings: Settings) -> None:
        self._model, self._labels, self._clip = model, labels, settings.clip
        self._parameters = list(parameters)
        self._device = labels.device
        self._cuda = self._device.type == "cuda"
        self._rate = torch.tensor(0.0, device=self._device)
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._rate,
            betas=(0.9, 0.98),
            weight_decay=settings.decay,
            fused=True,
            capturable=self._cuda,
        )
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._loss = torch.zeros((), device=self._device)
        self._seen: set[int] = set()
        self._recorded: dict[int, tuple[Any, Batch]] = {}
        self._pool: Any = None
        self._side: Any = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]
        self._recording = self._cuda and bool(settings.record)
        self._steps = 0

    def step(self, batch: Batch, rate: float) -> Tensor:
        """Learn from one batch; returns the loss, a tensor that the next step overwrites."""
        self._rate.fill_(rate)
        self._steps += 1
        if self._cuda and self._steps % 32 == 0:
            torch.cuda.synchronize()  # the clock and the progress bar should not run ahead of the device
        if not self._cuda:
            self._work(batch)
            return self._loss
        width = batch.ids.shape[1]
        batch = Batch(*(part.to(self._device, non_blocking=True) for part in batch))
        if width in self._recorded:
            graph, held = self._recorded[width]
            for mine, theirs in zip(held, batch, strict=True):
                mine.copy_(theirs)
            graph.replay()
            return self._loss
        if width in self._seen and self._recording:
            self._record(width, batch)
            return self.step(batch, rate)
        self._seen.add(width)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._work(batch)
        torch.cuda.current_stream().wait_stream(self._side)
        return self._loss

    def _work(self, batch: Batch) -> None:
        self._optimizer.zero_grad(set_to_none=False)
        loss = loss_of(label_logits(self._model, self._labels, batch), batch.target)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, self._clip, foreach=True)
        self._optimizer.step()
        self._loss.copy_(loss.detach())

    def _record(self, width: int, batch: Batch) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._work(batch)
        except RuntimeError as failure:
            tqdm.write(f"steps are not recorded: {failure}", file=sys.stderr)
            self._recording = False
            torch.cuda.synchronize()
            return
        self._pool = self._pool or graph.pool()
        self._recorded[width] = (graph, batch)


def cut_to_rank(model: Any, base: dict[str, Tensor], rank: int) -> tuple[list[nn.Parameter], float]:
    """Put `base + b @ a` in place of each learnt weight, the factors from the change's first singular directions.

    Returns the factors, and the share of the change (of its squared norm) that they keep.
    """
    kept = total = 0.0
    factors: list[nn.Parameter] = []
    for name, linear in linears(model):
        with torch.no_grad():
            origin = base[name].to(linear.weight.device)
            change = linear.weight - origin
            size = min(rank, *change.shape)
            u, s, v = torch.svd_lowrank(change, q=min(size + 16, *change.shape), niter=6)
            root = s[:size].sqrt()
            a, b = (v[:, :size] * root).T.contiguous(), (u[:, :size] * root).contiguous()
            kept += float(s[:size].square().sum())
            total += float(change.square().sum())
            linear.weight.copy_(origin)
        linear.weight.requires_grad_(False)
        change_of = LowRank(a, b)
        parametrize.register_parametrization(linear, "weight", change_of)
        factors += [change_of.a, change_of.b]
    return factors, kept / total if total else 1.0


def factors_of(model: Any) -> dict[str, Tensor]:
    """The adapter's tensors, float16."""
    found = {}
    for name, linear in linears(model):
        parametrizations: Any = linear.parametrizations
        change = parametrizations.weight[0]
        found[f"{name}.a"], found[f"{name}.b"] = (t.detach().half().cpu().contiguous() for t in (change.a, change.b))
    return found


@torch.no_grad()
def probe(model: Any, labels: Tensor, encoder: Encoder, items: Sequence[Item], tokens: int) -> list[list[float]]:
    """The label logits of every item, in the order of the items, as the weights stand now."""
    logits: list[list[float]] = [[]] * len(items)
    for places, batch in ordered(encoder, items, tokens):
        batch = Batch(*(part.to(labels.device) for part in batch))
        for place, row in zip(places, label_logits(model, labels, batch).tolist(), strict=True):
            logits[place] = row[: len(items[place].target)]
    return logits


def shares_right(items: Sequence[Item], logits: Sequence[Sequence[float]]) -> dict[str, float]:
    """The share of right answers by question type."""
    found: dict[str, float] = {}
    for kind in KINDS:
        right = [
            max(range(len(row)), key=row.__getitem__) == item.gold
            for item, row in zip(items, logits, strict=True)
            if item.kind == kind
        ]
        found[kind] = round(sum(right) / max(1, len(right)), 4)
    return found


def train(
    model: Any,
    base_folder: Path,
    items: Sequence[Item],
    settings: Settings,
    device: torch.device,
    check: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, Any]:
    """Train in both stages; afterwards the model's linear weights are parametrized with the factors.

    `check` is called `settings.checks` times with the step and the mean loss since the last call.

    Returns what happened: steps, items, tokens, seconds, the share of the change kept when it was cut.
    """
    torch.manual_seed(settings.seed)
    labels = torch.tensor(Encoder(base_folder).label_ids, device=device)
    base = {name: linear.weight.detach().cpu().clone() for name, linear in linears(model)}
    stream = Stream(base_folder, items, settings.tokens, settings.seed)
    ahead = 32 if settings.workers else None
    batches = iter(DataLoader(stream, batch_size=None, num_workers=settings.workers, prefetch_factor=ahead))
    stepper = Stepper(model, labels, learning(model), settings)
    facts: dict[str, Any] = {"items": 0, "tokens": 0, "kept": None}
    total = torch.zeros((), device=device)
    counted = step = began = checked = 0
    start = time.monotonic()
    cut = False
    with tqdm(total=settings.steps, desc="all weights", unit="step", file=sys.stderr) as bar:
        while True:
            done = max(step / settings.steps, (time.monotonic() - start) / (60 * settings.minutes))
            if counted and (done >= (checked + 1) / settings.checks or done >= 1):
                checked = int(done * settings.checks)
                mean = float(total) / counted
                bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
                check(step, mean)
                total.zero_()
                counted = 0
            if done >= 1 and cut:
                break
            if not cut and done >= settings.full:
                cut, began = True, step
                del stepper
                factors, facts["kept"] = cut_to_rank(model, base, settings.rank)
                stepper = Stepper(model, labels, factors, settings)
                bar.set_description("factors")
            warm = min(1.0, (step - began + 1) / settings.warmup)
            peak = settings.factor_rate if cut else settings.rate
            batch = next(batches)
            total += stepper.step(batch, peak * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))))
            counted += 1
            step += 1
            facts["items"] += len(batch.last)
            facts["tokens"] += batch.ids.numel()
            bar.update()
    return facts | {"steps": step, "seconds": round(time.monotonic() - start, 1)}


def merged_difference(
    base_folder: Path,
    adapter: Path,
    encoder: Encoder,
    items: Sequence[Item],
    logits: Sequence[Sequence[float]],
    device: torch.device,
    tokens: int,
) -> float:
    """How far the merged model's probabilities are from those of these logits at most: the trained model's."""
    merged = load(base_folder, torch.device("cpu"))
    build._merge(merged, adapter)
    merged = merged.bfloat16().float().to(device)
    labels = torch.tensor(encoder.label_ids, device=device)
    again = probe(merged, labels, encoder, items, tokens)
    pairs = zip(map(probabilities, logits), map(probabilities, again), strict=True)
    return max(abs(p - q) for one, other in pairs for p, q in zip(one, other, strict=True))


def write_adapter(path: Path, model: Any, temperatures: dict[str, float]) -> str:
    """Write the adapter with its temperatures and return its digest."""
    metadata = {"temperature": json.dumps(temperatures, sort_keys=True)}
    save_file(factors_of(model), path, metadata)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pin(digest: str) -> None:
    """Put the adapter's digest into the repository's weights.sha256."""
    name = f"{build.ADAPTER.parent.name}/{build.ADAPTER.name}"
    rows = [row for row in build.PINS.read_text().splitlines() if row.split(maxsplit=1)[1:] != [name]]
    build.PINS.write_text("\n".join([*rows, f"{digest}  {name}"]) + "\n")


def main() -> int:
    """Train, fit the temperatures, write the adapter and the log beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that mini.data wrote")
    parser.add_argument("--base", type=Path, help="the base as a model folder; built if not given")
    parser.add_argument("--out", type=Path, default=build.ADAPTER)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="use so many training items only")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    args = parser.parse_args()
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    device = torch.device(args.device)
    base = args.base or build.ensure(adapted=False)

    items = list(read_items(args.data / "train.jsonl.gz"))
    items = random.Random(settings.seed).sample(items, args.limit) if args.limit else items
    measuring = {name: list(read_items(args.data / f"{name}.jsonl.gz")) for name in ("familiar", "unseen", "fit")}
    sample = {
        name: random.Random(settings.seed).sample(found, min(len(found), settings.check_items))
        for name, found in measuring.items()
    }
    model = load(base, device)
    encoder = Encoder(base)
    labels = torch.tensor(encoder.label_ids, device=device)
    curve: list[dict[str, Any]] = []
    start = time.monotonic()

    def check(step: int, loss: float) -> None:
        point: dict[str, Any] = {"step": step, "seconds": round(time.monotonic() - start, 1), "loss": round(loss, 4)}
        for name in ("familiar", "unseen"):
            point[name] = shares_right(sample[name], probe(model, labels, encoder, sample[name], settings.tokens))
        curve.append(point)
        tqdm.write(json.dumps(point), file=sys.stderr)

    facts = train(model, base, items, settings, device, check)
    write_adapter(args.out, model, dict.fromkeys(KINDS, 1.0))  # whatever fails from here on, the training is kept
    temperatures = fitted_temperatures(
        measuring["fit"], probe(model, labels, encoder, measuring["fit"], settings.tokens)
    )
    digest = write_adapter(args.out, model, temperatures)
    seen = sample["unseen"]
    difference = merged_difference(
        base, args.out, encoder, seen, probe(model, labels, encoder, seen, settings.tokens), device, settings.tokens
    )
    if args.out.resolve() == build.ADAPTER.resolve():
        pin(digest)
    log = {
        "settings": asdict(settings),
        **facts,
        "curve": curve,
        "temperature": temperatures,
        "merged_max_dp": round(difference, 5),
        "sha256": digest,
        "bytes": args.out.stat().st_size,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "widths": list(WIDTHS),
    }
    args.out.with_suffix(".json").write_text(json.dumps(log, indent=1) + "\n")
    print(json.dumps(log))
    return 0


if __name__ == "__main__":
    sys.exit(main())
