"""Requests that nobody would write: from the API's own description, and as bytes of bodies and of heads.

None may be answered 5xx, and no connection may end unannounced while the framing is valid. BLINK_FUZZ_S is the time for
all of them in seconds; `make fuzz FUZZ_S=3600` spends an hour.
"""

import gzip
import json
import logging
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from servers import KEY, RunningServer
from test_batcher import GatedEngine
from test_transport import HEALTH, Running, running

import wire
from answers import Scores
from prompts import Prompts

SHARE_S = float(os.environ.get("BLINK_FUZZ_S") or 60) / 4
SEED = random.SystemRandom().randrange(1 << 30) if "BLINK_FUZZ_S" in os.environ else 0
SECRET = "cargo of amber"


class EvenEngine(GatedEngine):
    """Scores all labels of every question alike."""

    def prepare(self, request: wire.DecisionRequest) -> Prompts:
        asked = request.questions.values()
        counts = [2 if isinstance(question, wire.Noul) else len(question.criteria) for question in asked]
        return Prompts([0], [[1]] * len(counts), counts)

    def outcome(self, prompts: Prompts) -> Scores:
        return [[0.0] * count for count in prompts.counts]


class Watch(logging.Handler):
    """Keeps what no server should log: request text, and faults."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING or SECRET in text:
            self.found.append(text)


class Client:
    """One connection, made anew only where the server announced its end."""

    def __init__(self, made: Running) -> None:
        self.made = made
        self._socket: socket.socket | None = None

    def ask(self, data: bytes, *, head: bool = False) -> tuple[int, dict[str, str], bytes]:
        """The response to one request; fails the test if there is none, or if more follows than it announces."""
        if self._socket is None:
            self._socket = self.made.connect()
            self._stream = self._socket.makefile("rb")
        self._socket.sendall(data)
        status, headers = self._response_head()
        while status == 100:
            status, headers = self._response_head()
        body = b"" if head else self._stream.read(int(headers["content-length"]))
        if headers.get("connection") == "close":
            assert self._stream.read() == b""
            self.close()
        return status, headers, body

    def _response_head(self) -> tuple[int, dict[str, str]]:
        line = self._stream.readline()
        assert line.startswith(b"HTTP/1.1 "), "the connection was dropped"
        lines = iter(self._stream.readline, b"\r\n")
        headers = dict(line.decode("latin-1").strip().lower().split(": ", 1) for line in lines)
        return int(line.split()[1]), headers

    def close(self) -> None:
        if self._socket is not None:
            self._stream.close()
            self._socket.close()
            self._socket = None


@pytest.fixture
def client() -> Iterator[Client]:
    """Asks an in-process server at its default log level, with access lines; fails the test if it logs anything odd."""
    watch = Watch()
    logger = logging.getLogger("blink")
    logger.addHandler(watch)
    level, logger.level = logger.level, logging.INFO
    engine = EvenEngine()
    engine.gate.set()
    try:
        with running(engine=engine) as made:
            made.service.access_log = True
            made.service.max_body_bytes = 1 << 16
            asking = Client(made)
            yield asking
            asking.close()
    finally:
        logger.removeHandler(watch)
        logger.level = level
    assert watch.found == []


def spend(check: Callable[..., None], **strategies: st.SearchStrategy[Any]) -> None:
    """Try `check` on examples until its share of the time is over, at least one round."""
    began = time.monotonic()
    number = SEED
    tried = 0

    def counted(**drawn: Any) -> None:
        nonlocal tried
        tried += 1
        check(**drawn)

    while True:
        quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
        phases = [Phase.generate, Phase.shrink]
        options = settings(
            max_examples=200, deadline=None, suppress_health_check=quiet, phases=phases, database=None, print_blob=True
        )
        seed(number)(options(given(**strategies)(counted)))()
        number += 1
        if time.monotonic() > began + SHARE_S:
            name = check.__qualname__.split(".")[0]
            print(f"\n{name}: {tried:,} tried in {time.monotonic() - began:.0f} s, seed {SEED}")
            return


# --- by the description ----------------------------------------------------------------------------------------------


def test_requests_by_the_description(keyed_server: RunningServer, tmp_path: Path) -> None:
    command = [
        *(Path(sys.executable).with_name("schemathesis"), "--no-color", "run", f"{keyed_server.url}/openapi.json"),
        *("--header", f"Authorization: Bearer {KEY}", "--max-time", str(max(1, int(SHARE_S))), "--seed", str(SEED)),
        "--warnings=off",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print("\nby the description:", *re.findall(r"\d+ generated.*", done.stdout), f"seed {SEED}")
    assert re.search(r"Operations: +[5-9] selected", done.stdout)
    assert "Traceback" not in keyed_server.stderr
    assert " failed: " not in keyed_server.stderr


# --- bodies ----------------------------------------------------------------------------------------------------------

texts = st.text(max_size=12) | st.just(SECRET)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
contents = texts | st.lists(values, max_size=3) | st.dictionaries(texts, values, max_size=3)
questions = (
    st.fixed_dictionaries({"type": st.just("noul"), "instructions": contents})
    | st.fixed_dictionaries(
        {"type": st.just("choice"), "criteria": st.dictionaries(texts, contents | st.none(), max_size=5)},
        optional={"instructions": contents},
    )
    | st.fixed_dictionaries({"type": st.just("score"), "criteria": st.lists(contents, max_size=12)})
    | st.fixed_dictionaries({"type": texts, "criteria": values})
    | values
)
requests = st.fixed_dictionaries(
    {"state": contents | values, "questions": st.dictionaries(texts, questions, max_size=4) | values},
    optional={"model": texts | values, "images": values, "assets": values, "more": values},
)
written = st.builds(
    lambda value, plain: json.dumps(value, ensure_ascii=plain).encode("utf-8", "surrogatepass"), requests, st.booleans()
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A body with parts taken out, doubled or replaced by other bytes."""
    body = draw(written)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(body)))
        end = draw(st.integers(start, min(len(body), start + 8)))
        body = body[:start] + draw(st.binary(max_size=4) | st.just(body[start:end] * 2)) + body[end:]
    return body


good = st.builds(
    lambda state, asked: json.dumps({"state": state, "questions": asked}).encode(),
    texts,
    st.dictionaries(
        texts.filter(bool),
        st.just({"type": "noul", "instructions": "?"})
        | st.dictionaries(texts, texts | st.none(), min_size=1).map(lambda some: {"type": "choice", "criteria": some})
        | st.lists(texts, min_size=1, max_size=10).map(lambda some: {"type": "score", "criteria": some}),
        min_size=1,
        max_size=4,
    ),
)
bodies = st.one_of(
    good,
    written,
    damaged(),
    st.binary(max_size=200),
    values.map(lambda value: json.dumps(value).encode()),
    st.integers(1, 20_000).map(lambda depth: b'{"state":' + b"[" * depth + b"]" * depth + b"}"),
    st.integers(1, 6_000).map(lambda digits: b'{"state":[' + b"9" * digits + b"]}"),
)
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "identity": bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


def chunked(body: bytes, sizes: list[int]) -> bytes:
    parts = []
    for size in sizes:
        part, body = body[:size], body[size:]
        parts.append(part)
    parts.append(body)
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"


def test_bodies(client: Client) -> None:
    seen: set[int] = set()

    def check(body: bytes, coding: str, honest: bool, sizes: list[int] | None, kind: bytes) -> None:
        sent = CODINGS[coding](body) if honest else body
        lines = [b"POST /v1/systemone HTTP/1.1", b"Host: x", b"Content-Type: " + kind]
        if coding:
            lines.append(b"Content-Encoding: " + coding.encode())
        lines.append(b"Content-Length: %d" % len(sent) if sizes is None else b"Transfer-Encoding: chunked")
        framed = sent if sizes is None else chunked(sent, sizes)
        status, headers, answer = client.ask(b"\r\n".join(lines) + b"\r\n\r\n" + framed)
        assert status in (200, 400, 422)
        assert "connection" not in headers
        told = json.loads(answer)
        assert headers["content-type"] == "application/json"
        if status == 200:
            wire.DecisionResponse.model_validate(told)
        else:
            wire.ViolationsError.model_validate(told)
        seen.add(status)

    spend(
        check,
        body=bodies,
        coding=st.sampled_from(list(CODINGS)),
        honest=st.booleans() | st.just(True),
        sizes=st.none() | st.lists(st.integers(1, 300), max_size=4),
        kind=st.sampled_from([b"application/json", b"text/plain", b"application/json; charset=latin-1", b"nonsense"]),
    )
    assert seen == {200, 400, 422}


# --- heads -----------------------------------------------------------------------------------------------------------

TOKEN = "!#$%&'*+-.^_`|~" + "".join(map(chr, [*range(48, 58), *range(65, 91), *range(97, 123)]))
FRAMING = {"content-length", "transfer-encoding"}
tokens = st.text(TOKEN, min_size=1, max_size=16)
known = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "PRI"]
methods = st.sampled_from(known) | tokens
routes = ["/v1/systemone", "/v1/models", "/healthz", "/metrics", "/openapi.json"]
paths = st.sampled_from([*routes, "/", "*", "//x", "/%00"])
visible = st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f", exclude_categories=["Cc"])
queries = st.builds("{}?{}".format, paths, st.text(visible, max_size=9))
targets = paths | st.text(visible, min_size=1, max_size=40) | queries
field = st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_categories=["Cc"]) | st.just("\t")
meaningful = ["Host", "Expect", "Connection", "Content-Encoding", "Content-Type", "Authorization", "traceparent", "TE"]
names = st.sampled_from(meaningful) | tokens.filter(lambda name: name.lower() not in FRAMING)
usual = ["100-continue", "close", "keep-alive", "gzip", "zstd", "Bearer x", "multipart/form-data; boundary=x", "h2c"]
few = st.lists(st.tuples(names, st.sampled_from(usual) | st.text(field, max_size=20)), max_size=8)
many = st.integers(90, 120).map(lambda count: [(f"x-{i}", "y") for i in range(count)])


def head_of(method: str, target: str, version: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"{method} {target} HTTP/{version}", *(f"{name}: {value}" for name, value in headers)]
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def test_heads(client: Client) -> None:
    def check(method: str, target: str, version: str, headers: list[tuple[str, str]], body: bytes) -> None:
        data = head_of(method, target, version, headers, body)
        status, _, answer = client.ask(data, head=method == "HEAD")
        assert status < 500
        if status >= 400 and method != "HEAD":
            assert list(json.loads(answer)) == ["error", "detail"]
        assert client.ask(HEALTH)[0] == 200  # what followed the request was not read as a part of it, nor the reverse

    spend(
        check,
        method=methods,
        target=targets,
        version=st.sampled_from(["1.1", "1.1", "1.0"]),
        headers=few | many,
        body=st.binary(max_size=40) | st.just(HEALTH) | written,
    )


pieces = st.binary(max_size=6) | st.sampled_from([b"\r", b"\n", b"\0", b" ", b":"])


@st.composite
def broken_heads(draw: st.DrawFn) -> bytes:
    """Bytes that were a head before something happened to them; never a whole body that someone could wait for."""
    head = head_of(draw(methods), draw(targets), "1.1", draw(few | many), b"")
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(head)))
        end = draw(st.integers(start, min(len(head), start + 8)))
        head = head[:start] + draw(pieces) + head[end:]
    return head


def test_broken_heads(client: Client) -> None:
    """Whatever comes, the server refuses or answers it, and serves the next client."""

    def check(head: bytes) -> None:
        with client.made.connect() as connection:
            connection.sendall(head)
            connection.shutdown(socket.SHUT_WR)
            got = b""
            try:
                while part := connection.recv(1 << 16):
                    got += part
            except ConnectionResetError:
                pass
        if got:
            status = int(got.split()[1])
            assert got.startswith(b"HTTP/1.1 ")
            assert status < 500 or status == 505
        assert client.ask(HEALTH)[0] == 200

    spend(check, head=broken_heads() | st.binary(max_size=120))
