"""Real processes from start to end: loading, signals, draining, a worker that dies."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from servers import ROOT, RunningServer, StartServer, free_port, wait_until
from test_transport import BODY, HEALTH, answers, post, running

import serve

# A server around an engine that the test holds: it scores once a line comes in, and dies if that line says so.
DRIVER = f"""
import sys, threading
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import serve
from batcher import Batcher
from keys import Keys
from service import Service
from test_batcher import GatedEngine

args = serve.parse_args(["--model", "mini", "--port", sys.argv[1]])
service = Service(name="m", keys=Keys(), max_body_bytes=4096, max_connections=32, request_timeout_s=60)
engine = GatedEngine()

def await_word():
    word = sys.stdin.readline().strip()
    def fault(batch):
        if word == "die":
            raise SystemExit("the engine is gone")
    engine.fault = fault
    engine.gate.set()

def start(on_death):
    threading.Thread(target=await_word, daemon=True).start()
    service.decider = Batcher(engine, on_death=on_death)
    service.status = "ok"

sys.exit(serve.run(service, args, start))
"""


class Driven(NamedTuple):
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def health(self) -> dict[str, Any]:
        with self.connect() as connection:
            connection.sendall(HEALTH)
            health: dict[str, Any] = json.loads(answers(connection, 1)[0][2])
        return health

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        self.process.stdin.flush()


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, str(script), str(port)], stdin=subprocess.PIPE, stderr=log)
    try:
        made = Driven(process, port, tmp_path / "log")
        RunningServer(process, port, made.log).wait_ready()
        yield made
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def waiting(server: Driven, count: int) -> Iterator[list[socket.socket]]:
    """Connections with a request each: the first is in the pass, the others wait."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(count)]
        for connection in connections:
            connection.sendall(post())
        wait_until(lambda: server.health()["queue"]["queued"] == count - 1)
        yield connections


# --- a real server ---------------------------------------------------------------------------------------------------


def wait_for_health(server: RunningServer, condition: Callable[[dict[str, Any]], bool]) -> list[tuple[int, Any]]:
    """What `/healthz` said until the condition held."""
    seen: list[tuple[int, Any]] = []
    while not seen or not condition(seen[-1][1]):
        assert server.process.poll() is None, server.stderr
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        with contextlib.suppress(OSError):
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            assert answer.headers["Retry-After"] == (None if answer.status == 200 else "1")
            seen.append((answer.status, json.loads(answer.read())))
        connection.close()
        time.sleep(0.02)
    return seen


def test_from_loading_to_the_end(start_server: StartServer) -> None:
    with start_server(wait=False) as server:
        wait_for_health(server, lambda health: True)
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as early:
            early.sendall(post())
            status, headers, body = answers(early, 1)[0]
            assert (status, headers["retry-after"]) == (503, "1")
            assert "loading" in json.loads(body)["error"]
            seen = wait_for_health(server, lambda health: health["ok"])
            *loading, (ready, health) = seen
            assert loading
            assert all((code, told["ok"], told["status"]) == (503, False, "loading") for code, told in loading)
            progress = [told["progress"] for _, told in loading]
            assert progress == sorted(progress)
            assert 0 <= progress[0] <= progress[-1] <= 1
            assert (ready, health["status"], "progress" in health) == (200, "ok", False)
            early.sendall(post())
            assert answers(early, 1)[0][0] == 200
            server.process.send_signal(signal.SIGTERM)  # `early` stays open and says nothing more
            assert server.process.wait(60) == 0, server.stderr
        assert "Traceback" not in server.stderr


@pytest.mark.parametrize(("number", "progress"), [(signal.SIGTERM, 0.0), (signal.SIGINT, 0.3)])
def test_a_loading_server_ends_with_0_and_leaves_nothing(
    start_server: StartServer, tmp_path: Path, number: int, progress: float
) -> None:
    with start_server(wait=False, env={"TMPDIR": str(tmp_path)}) as server:
        wait_for_health(server, lambda health: health["ok"] or health["progress"] >= progress)
        server.process.send_signal(number)
        assert server.process.wait(60) == 0, server.stderr
    assert list(tmp_path.iterdir()) == []


class Sent(NamedTuple):
    """A request of the test below: when it had been sent whole, and its status or how its connection ended."""

    at: float
    outcome: int | str


def test_stopping_under_load_answers_what_was_sent(start_server: StartServer) -> None:
    sent: list[Sent] = []

    def client(port: int) -> None:
        """Ask again and again over one connection after another until none is to be had."""
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=60)
            except ConnectionRefusedError:
                return
            with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(5):
                    connection.sendall(post())
                    at = time.monotonic()
                    outcome, closes = receive(connection)
                    sent.append(Sent(at, outcome))
                    if closes:
                        break

    def receive(connection: socket.socket) -> tuple[int | str, bool]:
        try:
            first = connection.recv(1, socket.MSG_PEEK)
        except ConnectionResetError:
            first = b""
        if not first:
            return "nothing", True
        status, headers, _ = answers(connection, 1)[0]  # what has begun comes whole
        return status, headers.get("connection") == "close"

    with start_server("--continuous") as server, ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(client, server.port) for _ in range(16)]
        wait_until(lambda: len(sent) >= 60 or any(one.done() for one in clients))
        signalled = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for one in clients:
            one.result(60)
        assert server.process.wait(60) == 0, server.stderr
        assert "Traceback" not in server.stderr
    before = [outcome for at, outcome in sent if at < signalled]
    assert len(before) >= 60
    assert set(before) <= {200, 503}
    assert {outcome for _, outcome in sent} <= {200, 503, "nothing"}


# --- an engine that the test holds -----------------------------------------------------------------------------------


def test_draining_finishes_what_waits_whatever_signals_come(driven: Driven) -> None:
    with driven.connect() as idle, driven.connect() as silent, waiting(driven, 4) as connections:
        for connection in (idle, silent):
            connection.sendall(HEALTH)
            assert answers(connection, 1)[0][0] == 200
        for number in (signal.SIGTERM, signal.SIGINT) * 500:
            driven.process.send_signal(number)
        wait_until(lambda: refused(driven.port))
        idle.sendall(HEALTH)
        status, headers, body = answers(idle, 1)[0]
        assert (status, json.loads(body)["status"], headers["connection"]) == (503, "draining", "close")
        assert driven.process.poll() is None
        driven.say("score")
        for connection in connections:
            status, headers, _ = answers(connection, 1)[0]
            assert (status, headers["connection"]) == (200, "close")
        assert driven.process.wait(60) == 0
    assert "Traceback" not in driven.log.read_text()


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_dead_worker_answers_what_waits_and_ends_the_process(driven: Driven) -> None:
    with waiting(driven, 4) as connections:
        driven.say("die")
        for connection in connections:
            status, headers, body = answers(connection, 1)[0]
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(body)["detail"]["error_type"] == "overloaded_error"
        assert driven.process.wait(60) == 1
    log = driven.log.read_text()
    assert "the decision worker died" in log
    assert "Traceback" not in log
    assert "fog" in BODY.decode()
    assert "fog" not in log


def test_a_dead_worker_shows_in_health() -> None:
    def fault(batch: Any) -> None:
        raise SystemExit("the engine is gone")

    with running() as made, made.connect() as connection:
        made.engine.fault = fault
        made.engine.gate.set()
        connection.sendall(post() + HEALTH + post())
        (first, *_), (health, headers, body), (second, _, refusal) = answers(connection, 3)
        assert (first, health, headers["retry-after"], second) == (503, 503, "1", 503)
        told = json.loads(body)
        assert (told["ok"], told["status"], told["queue"]["worker_alive"]) == (False, "failed", False)
        assert "failed" in json.loads(refusal)["error"]


def test_draining_gives_up_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "DRAIN_S", 0.2)
    with running() as made, made.connect() as connection:
        connection.sendall(post())
        assert made.engine.entered.acquire(timeout=20)
        assert serve.drain(made.service, []) == 1
        made.engine.gate.set()
        assert answers(connection, 1)[0][0] == 200
