"""Batches of few shapes: items become prompts in the server's own form, prompts of like length go together."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import AutoTokenizer

import wire
from mini.items import Item
from prompts import PromptEncoder

WIDTHS = (96, 112, 128, 144, 160, 176, 192, 224, 256, 320, 416)
"""Padded lengths. A GPU keeps one recorded step for each, so there are few; longer prompts are not trained on."""
OPTIONS = 16
"""Most options of an item."""


class Batch(NamedTuple):
    """Right-padded prompts. A causal model's last real position sees nothing of the padding."""

    ids: Tensor
    """[rows, width] int64."""
    last: Tensor
    """[rows] int64, the position of each prompt's last token."""
    target: Tensor
    """[rows, OPTIONS] float32, the probability of each option; -1 where a row offers none."""


@dataclass(slots=True)
class Row:
    """One prompt as token ids with its answer."""

    ids: list[int]
    target: list[float]


class Encoder:
    """Items to rows with the chat template and the labels of a model folder, as the server makes prompts."""

    def __init__(self, folder: Path) -> None:
        self._prompts = PromptEncoder(AutoTokenizer.from_pretrained(folder))
        self.label_ids = self._prompts.label_ids[:OPTIONS]

    def row(self, item: Item) -> Row:
        prompts = self._prompts.encode(wire.validate(item.request()))
        return Row(prompts.prefix + prompts.tails[0], item.target)


def collate(rows: Sequence[Row], width: int) -> Batch:
    """One batch of rows, none longer than `width`."""
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    target = torch.full((len(rows), OPTIONS), -1.0)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        target[i, : len(row.target)] = torch.tensor(row.target)
    return Batch(ids, torch.tensor([len(row.ids) - 1 for row in rows]), target)


class Stream(IterableDataset[Batch]):
    """Endless batches of about `tokens` padded tokens; every epoch draws the order of items and of options anew.

    With several workers each takes its share of every epoch; the batches depend on the seed and the number of workers.
    """

    def __init__(self, folder: Path, items: Sequence[Item], tokens: int, seed: int) -> None:
        super().__init__()
        self._folder = folder
        self._items = items
        self._tokens = tokens
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
        encoder = Encoder(self._folder)
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        waiting: dict[int, list[Row]] = {width: [] for width in WIDTHS}
        epoch = 0
        while True:
            order = random.Random(f"{self._seed} {epoch}").sample(range(len(self._items)), len(self._items))
            for place in order[worker::workers]:
                draw = random.Random(f"{self._seed} {epoch} {place}")
                row = encoder.row(self._items[place].shuffled(draw))
                width = next((width for width in WIDTHS if width >= len(row.ids)), None)
                if width is None or len(row.target) > OPTIONS:
                    continue
                rows = waiting[width]
                rows.append(row)
                if len(rows) == max(1, self._tokens // width):
                    yield collate(rows, width)
                    rows.clear()
            epoch += 1


def ordered(encoder: Encoder, items: Sequence[Item], tokens: int) -> Iterator[tuple[list[int], Batch]]:
    """Every item once, with the places of the items in each batch; for measuring."""
    rows = [encoder.row(item) for item in items]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
    while order:
        width = len(rows[order[0]].ids)
        count = 1
        while count < len(order) and (count + 1) * len(rows[order[count]].ids) <= tokens:
            width, count = len(rows[order[count]].ids), count + 1
        yield order[:count], collate([rows[i] for i in order[:count]], width)
        order = order[count:]
