"""A training or evaluation item: one state, one question as on the wire, and how likely each answer is right."""

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

Kind = Literal["choice", "noul", "score"]
KINDS: tuple[Kind, ...] = ("choice", "noul", "score")


@dataclass(frozen=True, slots=True)
class Item:
    """One question about one state, with its answer."""

    family: str
    state: Any
    question: dict[str, Any]
    """As a client sends it: `type`, `instructions`, `criteria`."""
    target: list[float]
    """Probability of each option in label order: the options, yes and no, or the levels from low to high."""

    @property
    def kind(self) -> Kind:
        return cast(Kind, self.question["type"])

    @property
    def gold(self) -> int:
        """The likeliest option, the first of equals."""
        return self.target.index(max(self.target))

    def request(self) -> dict[str, Any]:
        """The request that asks this question under the id `q`."""
        return {"state": self.state, "questions": {"q": self.question}}

    def reordered(self, order: list[int]) -> "Item":
        """The same choice with its options in another order: position i gets the option that was at `order[i]`."""
        criteria = self.question["criteria"]
        if isinstance(criteria, dict):
            pairs = list(criteria.items())
            criteria = dict(pairs[i] for i in order)
        else:
            criteria = [criteria[i] for i in order]
        return Item(self.family, self.state, self.question | {"criteria": criteria}, [self.target[i] for i in order])

    def shuffled(self, draw: random.Random) -> "Item":
        """A choice with its options in an order drawn anew; the sides of a yes/no and the levels keep theirs."""
        if self.kind != "choice":
            return self
        return self.reordered(draw.sample(range(len(self.target)), len(self.target)))


def write_items(path: Path, items: Iterable[Item]) -> int:
    """Write items as gzipped JSON lines, the same bytes for the same items, and return how many there were."""
    count = 0
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as out:
        for item in items:
            out.write((json.dumps(asdict(item), ensure_ascii=False, separators=(",", ":")) + "\n").encode())
            count += 1
    return count


def read_items(path: Path) -> Iterator[Item]:
    """The items of a file made by `write_items`."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield Item(**json.loads(line))
