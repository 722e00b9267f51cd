"""Two real replicas behind a real nginx with `deploy/nginx.conf`, of which the tests change addresses only."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path

import pytest
from clients import ASKED, ask, load
from servers import ROOT, RunningServer, free_port, start_server

import transport

CONF = ROOT / "deploy" / "nginx.conf"
REPLICAS = ("172.30.82.11:8000", "172.30.82.12:8000")
LISTENS = "listen 8080;"


@contextlib.contextmanager
def nginx(folder: Path, ports: Sequence[int]) -> Iterator[int]:
    """Run nginx in front of these ports; yields its own."""
    found = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("nginx is missing")
        pytest.skip("needs nginx")
    own = free_port()
    conf = CONF.read_text()
    for there, here in [
        *zip(REPLICAS, (f"127.0.0.1:{port}" for port in ports), strict=True),
        (LISTENS, f"listen 127.0.0.1:{own};"),
    ]:
        assert conf.count(there) == 1
        conf = conf.replace(there, here)
    (folder / "nginx.conf").write_text(conf)
    with (folder / "log").open("wb") as log:
        command = [found, "-p", folder, "-e", "stderr", "-c", folder / "nginx.conf"]
        if os.geteuid() == 0:  # else its workers, of another user, could not write to the folder
            command += ["-g", "user root;"]
        process = subprocess.Popen(command, stderr=log)
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", own), timeout=5):
                break
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield own
    finally:
        process.terminate()
        process.wait(20)


class Replicas:
    """Two servers at fixed ports, each of which can be started again."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.ports = [free_port(), free_port()]
        self.running = [self._start(port) for port in self.ports]
        for one in self.running:
            one.wait_ready()

    def _start(self, port: int) -> RunningServer:
        made = start_server("--continuous", port=port, wait=False, env={"OMP_NUM_THREADS": "1"})
        return self._stack.enter_context(made)

    def start_again(self, number: int) -> None:
        """Start an ended replica and return when it is ready."""
        assert self.running[number].process.poll() is not None
        self.running[number] = self._start(self.ports[number])
        self.running[number].wait_ready()

    def decided(self, number: int) -> float:
        """Requests that a replica has answered with 200."""
        connection = HTTPConnection("127.0.0.1", self.ports[number], timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        (line,) = [line for line in lines if line.startswith('blink_requests_total{path="/v1/systemone",status="200"}')]
        return float(line.split()[-1])


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with contextlib.ExitStack() as stack:
        yield Replicas(stack)


@pytest.fixture(scope="module")
def front(replicas: Replicas, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with nginx(tmp_path_factory.mktemp("nginx"), replicas.ports) as port:
        yield port


def test_a_killed_replica_costs_no_answer(replicas: Replicas, front: int) -> None:
    with load(front) as made:
        made.wait_for(200)
        replicas.running[0].process.kill()
        assert replicas.running[0].process.wait(20) == -signal.SIGKILL
        made.wait_for(200)
        replicas.start_again(0)  # its port answers 503 while it loads
        made.wait_for(200)
    assert set(made.seen) == {"200"}, made.seen
    assert min(replicas.decided(0), replicas.decided(1)) > 50  # it takes part again


def test_a_rolling_restart_costs_no_answer(replicas: Replicas, front: int) -> None:
    with load(front) as made:
        for number in (0, 1):
            made.wait_for(100)
            assert replicas.running[number].stop() == 0
            made.wait_for(100)
            replicas.start_again(number)
        made.wait_for(100)
    assert set(made.seen) == {"200"}, made.seen
    assert min(replicas.decided(0), replicas.decided(1)) > 0


def test_without_replicas_clients_are_told_to_come_back(tmp_path: Path) -> None:
    with nginx(tmp_path, [free_port(), free_port()]) as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(3):
            status, headers, body = ask(connection)
            assert (status, headers["Retry-After"], headers["Content-Type"]) == (503, "1", "application/json")
            assert body["detail"] == {"error_type": "overloaded_error", "message": body["error"]}


def test_answers_pass_unchanged_and_metrics_stay_inside(replicas: Replicas, front: int) -> None:
    connection = HTTPConnection("127.0.0.1", front, timeout=60)
    for path, status, error_type in (
        ("/healthz", 200, None),
        ("/metrics", 404, "not_found"),
        ("/no", 404, "not_found"),
    ):
        connection.request("GET", path)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        assert (answer.status, body.get("detail", {}).get("error_type")) == (status, error_type)
        assert answer.headers["x-typesafe-request-id"].startswith("req_")
    status, _, body = ask(connection, "{}")
    assert (status, body["detail"][0]["loc"][0]) == (422, "body")
    assert ask(connection, ASKED + " " * (19 << 20))[0] == 200  # more than nginx keeps in memory
    status, headers, body = ask(connection, " " * (20 << 20) + ASKED)
    assert (status, body["detail"]["error_type"]) == (413, "request_too_large")
    assert headers["Content-Type"] == "application/json"


def test_nginx_never_uses_a_connection_that_a_replica_may_close() -> None:
    (kept,) = [
        line.split()[1] for line in CONF.read_text().splitlines() if line.strip().startswith("keepalive_timeout")
    ]
    assert int(kept.removesuffix("s;")) < transport.IDLE_S
