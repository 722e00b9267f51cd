"""Training on a tiny model: the server's prompts, a loss that falls, an adapter that merges to what was trained."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

import wire
from blink import TorchEngine
from mini import build, families, train
from mini.batches import OPTIONS, Encoder, Stream, collate, ordered
from mini.evaluate import answer, flips, guesses, tables
from mini.items import Item, read_items, write_items
from mini.metrics import calibration_error, fitted_temperatures, summary
from mini.train import Settings
from prompts import PromptEncoder


@pytest.fixture(scope="session")
def tiny(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model's tokenizer with two small random layers."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=2048,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    MistralForCausalLM(config).bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(mini).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def items() -> list[Item]:
    """Something that two layers can learn, with soft targets so that no answer is ever certain."""
    draw = random.Random(1)
    question = {"type": "noul", "instructions": "Is it warm?"}

    def item(word: str) -> Item:
        p = 0.85 if word == "warm" else 0.2
        return Item("warmth", " ".join([word] * draw.randint(4, 14)), question, [p, 1 - p])

    return [item(draw.choice(("warm", "cold"))) for _ in range(200)]


@pytest.fixture(scope="session")
def trained(
    tiny: Path, items: list[Item], tmp_path_factory: pytest.TempPathFactory
) -> tuple[object, Path, list[float]]:
    """A model after a short training in both stages, its adapter, and the losses on the way."""
    model = train.load(tiny, torch.device("cpu"))
    losses: list[float] = []
    settings = Settings(
        steps=80, minutes=5, tokens=768, rate=3e-3, factor_rate=3e-3, rank=8, warmup=4, workers=0, checks=8
    )
    facts = train.train(model, tiny, items, settings, torch.device("cpu"), lambda step, loss: losses.append(loss))
    assert facts["steps"] == 80
    assert 0.2 < facts["kept"] <= 1
    path = tmp_path_factory.mktemp("adapter") / "adapter.safetensors"
    train.write_adapter(path, model, {"choice": 1.5, "noul": 0.8, "score": 1.1})
    return model, path, losses


def test_prompts_are_the_servers(tiny: Path, items: list[Item]) -> None:
    encoder, server = Encoder(tiny), PromptEncoder(AutoTokenizer.from_pretrained(tiny))
    for item in items[:20]:
        prompts = server.encode(wire.validate(item.request()))
        row = encoder.row(item)
        assert row.ids == prompts.prefix + prompts.tails[0]
        assert len(row.target) == prompts.counts[0]
    assert encoder.label_ids == server.label_ids[:OPTIONS]


def test_logits_are_the_engines(tiny: Path, items: list[Item]) -> None:
    """Padded rows give what the server's engine gives, up to bfloat16."""
    engine = TorchEngine(tiny, "cpu")
    model = train.load(tiny, torch.device("cpu"))
    encoder = Encoder(tiny)
    labels = torch.tensor(encoder.label_ids)
    rows = [encoder.row(item) for item in items[:6]]
    batch = collate(rows, max(len(row.ids) for row in rows) + 7)
    logits = train.label_logits(model, labels, batch)
    expected = engine.score([engine.prepare(wire.validate(item.request())) for item in items[:6]])
    for row, scores in zip(logits.tolist(), expected, strict=True):
        assert not isinstance(scores, Exception)
        assert row[:2] == pytest.approx(scores[0], abs=0.05)
        assert max(row[2:]) < -1e8


def test_the_loss_falls(trained: tuple[object, Path, list[float]]) -> None:
    _, _, losses = trained
    assert losses[0] > 0.6
    assert losses[-1] < 0.5, "the targets themselves leave 0.46"


def test_the_merged_model_answers_as_the_trained_one(
    trained: tuple[object, Path, list[float]], tiny: Path, items: list[Item], tmp_path: Path
) -> None:
    model, adapter, _ = trained
    encoder = Encoder(tiny)
    labels = torch.tensor(encoder.label_ids)
    logits = train.probe(model, labels, encoder, items, 4096)
    merged = MistralForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    untouched = {name: p.clone() for name, p in merged.named_parameters()}
    build._merge(merged, adapter)
    changed = {name for name, p in merged.named_parameters() if not torch.equal(p, untouched[name])}
    assert changed == {name for name, _ in train.linears(merged)}
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    (tmp_path / build.TEMPERATURE).write_text(build._metadata(adapter)["temperature"])
    build._write(merged, tokenizer, tmp_path)

    engine = TorchEngine(tmp_path, "cpu")
    assert (engine.temperatures.choice, engine.temperatures.noul, engine.temperatures.score) == (1.5, 0.8, 1.1)
    expected = [torch.tensor(row).div(0.8).softmax(0).tolist() for row in logits]
    difference = train.merged_difference(tiny, adapter, encoder, items, logits, torch.device("cpu"), 4096)
    assert difference < 0.005
    differences = [abs(p[0] - q[0]) for p, q in zip(answer(engine, items), expected, strict=True)]
    assert max(differences) < 0.02
    assert max(abs(p[0] - 0.5) for p in expected) > 0.2, "a model that knows nothing would pass"
    assert build.TEMPERATURE in (tmp_path / "weights.sha256").read_text()


def test_the_stream_draws_every_epoch_anew(tiny: Path) -> None:
    draw = random.Random(3)
    choices = [families.trained()["word_field"].make(draw, "choice") for _ in range(6)]
    first, again = (iter(Stream(tiny, choices, 96, 7)) for _ in range(2))
    batches = [next(first) for _ in range(60)]
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(batches, (next(again) for _ in range(60)), strict=True))
    assert len({tuple(batch.ids.flatten().tolist()) for batch in batches}) > 20
    assert all(batch.target.clamp(min=0).sum(1).allclose(torch.ones(len(batch.last))) for batch in batches)


def test_every_item_is_measured_once(tiny: Path, items: list[Item]) -> None:
    places = [place for group, batch in ordered(Encoder(tiny), items, 1000) for place in group if len(batch.last)]
    assert sorted(places) == list(range(len(items)))


def test_items_travel(tmp_path: Path, items: list[Item]) -> None:
    paths = (tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz")
    assert [write_items(path, items) for path in paths] == [len(items)] * 2
    assert list(read_items(paths[0])) == items
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_temperatures_are_found() -> None:
    draw = random.Random(8)
    items, logits = [], []
    for _ in range(3000):
        gap = draw.gauss(0, 2)
        yes = draw.random() < 1 / (1 + pow(2.718281828, -gap))
        items.append(Item("x", "", {"type": "noul", "instructions": "?"}, [float(yes), float(not yes)]))
        logits.append([2.5 * gap, 0.0])
    found = fitted_temperatures(items, logits)
    assert found["noul"] == pytest.approx(2.5, rel=0.15)
    assert found["choice"] == 1.0


def test_figures() -> None:
    assert calibration_error([0.8] * 10, [True] * 8 + [False] * 2) == pytest.approx(0, abs=1e-9)
    assert calibration_error([0.9, 0.9], [False, False]) == pytest.approx(0.9)
    question = {"type": "noul", "instructions": "?"}
    items = [Item("x", "", question, target) for target in ([1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0])]
    always_yes = summary(items, [[0.9, 0.1]] * 4)
    assert (always_yes["accuracy"], always_yes["balanced"], always_yes["yes"]) == (0.75, 0.5, 1.0)
    levels = {"type": "score", "instructions": "?", "criteria": ["a", "b", "c"]}
    row = summary([Item("x", "", levels, [1.0, 0.0, 0.0])], [[0.0, 1.0, 0.0]])
    assert (row["accuracy"], row["within_one"], row["mae"]) == (0.0, 1.0, 1.0)
    assert tables(items, guesses(items))["all"]["noul"]["n"] == 4


def test_flips_are_counted(tiny: Path) -> None:
    """An untrained model prefers places to contents, so that turning the options changes many answers."""
    draw = random.Random(5)
    choices = [families.trained()["news_topic"].make(draw, "choice") for _ in range(24)]
    engine = TorchEngine(tiny, "cpu")
    assert 0 < flips(engine, choices, answer(engine, choices)) <= 1


def test_the_log_is_json(trained: tuple[object, Path, list[float]]) -> None:
    _, adapter, _ = trained
    assert json.loads(build._metadata(adapter)["temperature"]) == {"choice": 1.5, "noul": 0.8, "score": 1.1}
