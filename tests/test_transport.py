"""Connections over raw sockets, against the real handler with a batcher whose engine the tests hold."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from servers import wait_until
from test_batcher import GatedEngine
from test_tracing import GOOD, ID, SPAN

import transport
from batcher import Batcher
from keys import Keys
from service import DecisionHandler, Service

BODY = json.dumps({"state": "fog", "questions": {"q": {"type": "noul", "instructions": "?"}}}).encode()
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Running:
    port: int
    engine: GatedEngine
    service: Service
    batcher: Batcher

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextlib.contextmanager
def running(
    max_connections: int = 64, max_queued: int = 64, timeout_s: float = 30, engine: GatedEngine | None = None
) -> Iterator[Running]:
    engine = engine or GatedEngine()
    service = Service(
        name="m", keys=Keys(), max_body_bytes=4096, max_connections=max_connections, request_timeout_s=timeout_s
    )
    batcher = Batcher(engine, max_queued=max_queued, stuck_s=timeout_s)
    service.decider, service.status = batcher, "ok"
    handler = type("Bound", (DecisionHandler,), {"service": service})
    servers = transport.listen("127.0.0.1", 0, handler, max_connections=max_connections)
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield Running(servers[0].server_port, engine, service, batcher)
    finally:
        engine.gate.set()
        for server in servers:
            server.stop()
        batcher.close()


@pytest.fixture
def held() -> Iterator[Running]:
    """A server whose engine waits for its gate."""
    with running() as made:
        yield made


@pytest.fixture
def free(held: Running) -> Running:
    held.engine.gate.set()
    return held


def post(body: bytes = BODY, *headers: str, path: str = "/v1/systemone") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answers(connection: socket.socket, count: int) -> list[tuple[int, dict[str, str], bytes]]:
    found = []
    with connection.makefile("rb") as stream:
        for _ in range(count):
            status = int(stream.readline().split()[1])
            headers = dict(line.decode().strip().lower().split(": ", 1) for line in iter(stream.readline, b"\r\n"))
            found.append((status, headers, stream.read(int(headers["content-length"]))))
    return found


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_requests_share_a_connection_in_order(free: Running) -> None:
    with free.connect() as connection:
        connection.sendall(HEALTH + post() + b"\r\n" + post(b"{}") + HEALTH)
        assert [status for status, *_ in answers(connection, 4)] == [200, 200, 422, 200]


def test_idle_connections_outlive_those_of_clients() -> None:
    assert transport.IDLE_S > 30
    assert DecisionHandler.protocol_version == "HTTP/1.1"


def test_responses_are_written_at_once(free: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    setup = transport.Handler.setup

    def spying(self: Any) -> None:
        setup(self)
        assert self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        write = self.wfile.write
        self.wfile.write = lambda data: (writes.append(data), write(data))[1]

    monkeypatch.setattr(transport.Handler, "setup", spying)
    with free.connect() as connection:
        connection.sendall(HEALTH + post())
        answers(connection, 2)
    assert len(writes) == 2
    assert all(data.startswith(b"HTTP/1.1 200") and data.endswith(b"}") for data in writes)


def test_a_slow_head_is_dropped(free: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HEAD_S", 0.2)
    with free.connect() as connection:
        connection.sendall(b"GET /healthz HT")
        assert closed(connection)


def test_a_trickle_does_not_extend_the_deadline(free: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BODY_S", 0.3)
    with free.connect() as connection:
        connection.sendall(post()[: -len(BODY)])
        sender = threading.Thread(target=trickle, args=(connection,))
        sender.start()
        ((status, headers, body),) = answers(connection, 1)
        sender.join()
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(body)["detail"]["error_type"] == "timeout"


def trickle(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for byte in BODY[:20]:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)


def test_an_idle_connection_is_closed(free: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "IDLE_S", 0.1)
    with free.connect() as connection:
        assert closed(connection)


def test_a_client_that_ends_its_side_still_gets_its_answer(held: Running) -> None:
    with held.connect() as connection:
        connection.sendall(post())
        connection.shutdown(socket.SHUT_WR)
        assert held.engine.entered.acquire(timeout=20)
        time.sleep(0.2)  # several looks at the connection
        held.engine.gate.set()
        with connection.makefile("rb") as stream:
            response = stream.read()
    final = response.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert final.startswith(b"HTTP/1.1 200")


def test_a_body_that_ends_early_is_400(free: Running) -> None:
    with free.connect() as connection:
        connection.sendall(post()[:-5])
        connection.shutdown(socket.SHUT_WR)
        assert answers(connection, 1)[0][0] == 400


def test_a_client_that_left_costs_no_pass(held: Running) -> None:
    with held.connect() as first:
        first.sendall(post())
        assert held.engine.entered.acquire(timeout=20)
        gone = held.connect()
        gone.sendall(post())
        wait_until(lambda: held.batcher.queued() == 1)
        gone.close()
        wait_until(lambda: held.batcher.queued() == 0)
        held.engine.gate.set()
        assert answers(first, 1)[0][0] == 200
    assert held.engine.batches == [1]


def test_connections_beyond_the_most_are_refused() -> None:
    with running(max_connections=2) as made:
        made.engine.gate.set()
        with made.connect() as one, made.connect() as two:
            for connection in (one, two):
                connection.sendall(HEALTH)
                assert answers(connection, 1)[0][0] == 200
            with made.connect() as third:
                status, headers, _ = answers(third, 1)[0]
                assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            refused = {"path": "refused", "status": "503"}
            wait_until(lambda: made.service.metrics.registry.get_sample_value("blink_requests_total", refused) == 1)
            one.sendall(post())
            assert answers(one, 1)[0][0] == 200


def test_a_full_queue_is_503(held: Running) -> None:
    with running(max_queued=1) as made, made.connect() as one, made.connect() as two, made.connect() as three:
        one.sendall(post())
        assert made.engine.entered.acquire(timeout=20)
        two.sendall(post())
        wait_until(lambda: made.batcher.queued() == 1)
        three.sendall(post() + HEALTH)
        (status, headers, body), (health, *_) = answers(three, 2)
        assert (status, headers["retry-after"], health) == (503, "1", 200)
        assert json.loads(body)["detail"]["error_type"] == "overloaded_error"
        made.engine.gate.set()
        assert answers(one, 1)[0][0] == answers(two, 1)[0][0] == 200


def test_a_decision_not_done_in_time_is_504() -> None:
    with running(timeout_s=0.2) as made, made.connect() as connection:
        connection.sendall(post())
        assert answers(connection, 1)[0][0] == 504
        made.engine.gate.set()


def test_faults_tell_the_request_id_and_nothing_else(free: Running, caplog: pytest.LogCaptureFixture) -> None:
    def fault(batch: Any) -> None:
        raise RuntimeError("fog in the engine room")

    free.engine.fault = fault
    with free.connect() as connection:
        connection.sendall(post(BODY, f"traceparent: {GOOD}"))
        ((status, headers, body),) = answers(connection, 1)
    assert status == 500
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line.fields == {"request_id": headers["x-typesafe-request-id"], "trace_id": ID, "parent_id": SPAN}
    assert ID in line.getMessage()
    assert headers["x-typesafe-request-id"] in json.loads(body)["error"]
    assert b"fog" not in body
    assert "RuntimeError" in caplog.text
    assert "fog" not in caplog.text


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/systemone HTTP/1.1\r\nHost x\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/systemone HTTP/1.1\r\nContent-Length : 2\r\n\r\n{}",
        b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/systemone HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/systemone HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/systemone HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}x\r\n",
        b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 2, 2\r\n\r\n{}",
        b"POST /v1/systemone HTTP/1.1\r\nContent-Length: +2\r\n\r\n{}",
        b"NONSENSE\r\n\r\n",
    ],
)
def test_unclear_framing_is_400_and_ends_the_connection(free: Running, head: bytes) -> None:
    with free.connect() as connection:
        connection.sendall(head + HEALTH)
        ((status, headers, body),) = answers(connection, 1)
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body)["detail"][0]["loc"] == ["body"]
        assert closed(connection)


@pytest.mark.parametrize("lines", [b"X-A: 1\r\n" * 101, b"X-A: " + b"a" * 70_000 + b"\r\n"])
def test_endless_heads_are_refused(free: Running, lines: bytes) -> None:
    with free.connect() as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\n" + lines + b"\r\n")
        assert answers(connection, 1)[0][0] == 431


def test_a_body_too_large_is_refused_before_it_is_sent(free: Running) -> None:
    with free.connect() as connection:
        connection.sendall(post(b"x" * 5000, "Expect: 100-continue")[:-5000])
        assert answers(connection, 1)[0][0] == 413
        assert closed(connection)


def test_a_target_that_is_no_url_is_400(free: Running) -> None:
    with free.connect() as connection:
        connection.sendall(b"GET http://[ HTTP/1.1\r\n\r\n" + HEALTH)
        assert [status for status, *_ in answers(connection, 2)] == [400, 200]


def test_paths_are_not_echoed(free: Running) -> None:
    with free.connect() as connection:
        connection.sendall(post(path="/secret/../path") + HEALTH)
        (status, _, body), (health, *_) = answers(connection, 2)
    assert (status, health) == (404, 200)
    assert b"secret" not in body


def test_a_draining_server_says_so(free: Running) -> None:
    free.service.status = "draining"
    with free.connect() as connection:
        connection.sendall(HEALTH + post())
        (health, _, body), (status, *_) = answers(connection, 2)
    assert (health, status) == (503, 503)
    assert json.loads(body)["status"] == "draining"


@pytest.mark.parametrize("count", [100, 101])
def test_a_head_with_too_many_lines(free: Running, caplog: pytest.LogCaptureFixture, count: int) -> None:
    free.service.access_log = True
    caplog.set_level("INFO")
    for method in ("HEAD", "GET"):
        with free.connect() as connection:
            connection.sendall(f"{method} /healthz HTTP/1.1\r\n".encode() + b"x: fog\r\n" * count + b"\r\n")
            got = b"".join(iter(lambda: connection.recv(4096), b""))
        assert got.startswith(b"HTTP/1.1 431 ")
        assert got.endswith(b"\r\n\r\n" if method == "HEAD" else b"}")
        wait_until(lambda: " 431 " in caplog.text)
    assert "fog" not in caplog.text
    assert "failed" not in caplog.text
