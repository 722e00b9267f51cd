"""Measure a model folder on the files of `mini.data`, with the engine and the temperatures that the server uses.

    python -m mini.evaluate MODEL --data FOLDER [--untuned BASE] [--json FILE]

For each file and question type: accuracy, calibration error, Brier score; for yes/no the balanced accuracy and how
often yes was answered, for scores how often the likeliest level is within one; for choices how often the answer changes
when the options are given in the opposite order. The same for guessing, and for a second folder if one is given.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import wire
from answers import probabilities
from blink import TorchEngine
from mini.data import MEASURED
from mini.items import KINDS, Item, read_items
from mini.metrics import summary

_GROUP = 512  # items given to the engine together


def answer(engine: TorchEngine, items: Sequence[Item], title: str = "") -> list[list[float]]:
    """The probabilities of every item's options, in label order, as the engine would answer."""
    answered: list[list[float]] = []
    for start in tqdm(range(0, len(items), _GROUP), desc=title, unit="group", file=sys.stderr):
        requests = [wire.validate(item.request()) for item in items[start : start + _GROUP]]
        for request, scores in zip(requests, engine.score([engine.prepare(r) for r in requests]), strict=True):
            if isinstance(scores, Exception):
                raise scores
            answered.append(probabilities(scores[0], engine.temperatures.of(request.questions["q"])))
    return answered


def guesses(items: Sequence[Item]) -> list[list[float]]:
    """The same probability for every option, the likeliest one drawn by lot."""
    draw = random.Random(1)
    found = []
    for item in items:
        p = [1 / len(item.target)] * len(item.target)
        p[draw.randrange(len(p))] += 1e-9
        found.append(p)
    return found


def flips(engine: TorchEngine, items: Sequence[Item], answered: Sequence[Sequence[float]], title: str = "") -> float:
    """The share of choices whose answer changes when their options come in the opposite order."""
    turned = [item.reordered(list(range(len(item.target)))[::-1]) for item in items]
    again = answer(engine, turned, title)
    changed = [_top(p) != len(q) - 1 - _top(q) for p, q in zip(answered, again, strict=True)]
    return round(sum(changed) / max(1, len(changed)), 4)


def _top(p: Sequence[float]) -> int:
    return max(range(len(p)), key=p.__getitem__)


def tables(items: Sequence[Item], answered: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Figures by question type, together and by family."""
    found: dict[str, Any] = {"all": {}, "families": {}}
    for kind in KINDS:
        mine = [place for place, item in enumerate(items) if item.kind == kind]
        if mine:
            found["all"][kind] = summary([items[i] for i in mine], [answered[i] for i in mine])
        for family in sorted({items[i].family for i in mine}):
            rows = [i for i in mine if items[i].family == family]
            figures = summary([items[i] for i in rows], [answered[i] for i in rows])
            found["families"].setdefault(family, {})[kind] = figures
    return found


def measure(engine: TorchEngine, files: dict[str, list[Item]]) -> dict[str, Any]:
    """The tables of every file, the order flips of its choices with them."""
    found = {}
    for name, items in files.items():
        answered = answer(engine, items, name)
        found[name] = tables(items, answered)
        chosen = [place for place, item in enumerate(items) if item.kind == "choice"]
        if chosen:
            choices, before = [items[i] for i in chosen], [answered[i] for i in chosen]
            found[name]["all"]["choice"]["flips"] = flips(engine, choices, before, f"{name} turned")
    return found


def read_files(folder: Path, limit: int | None) -> dict[str, list[Item]]:
    """The measuring files, and `never_trained`: families never trained on and sys1bench's together."""
    files = {name: list(read_items(folder / f"{name}.jsonl.gz")) for name in MEASURED}
    if limit:
        files = {name: random.Random(3).sample(items, min(limit, len(items))) for name, items in files.items()}
    return files | {"never_trained": files["unseen"] + files["sys1bench"]}


def main() -> int:
    """Print the figures by file and question type, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--untuned", type=Path, help="a second folder to measure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=int, help="items of each file")
    parser.add_argument("--device")
    args = parser.parse_args()
    files = read_files(args.data, args.limit)
    found = {"guessing": {name: tables(items, guesses(items)) for name, items in files.items()}}
    for title, folder in (("untuned", args.untuned), ("model", args.model)):
        if folder:
            engine = TorchEngine(folder, args.device)
            found[title] = measure(engine, files)
            facts = {"device": str(engine.device), "dtype": str(engine.dtype), "torch": torch.__version__}
    report = {"facts": facts, "results": found}
    for title, sets in found.items():
        for name, table in sets.items():
            for kind, row in table["all"].items():
                print(f"{title:9} {name:14} {kind:7} {json.dumps(row)}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
