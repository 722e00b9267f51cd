"""`deploy/ray_app.py` on a real Ray cluster, all on this machine: what `make test-ray` runs, in its own environment."""

import asyncio
import contextlib
import gzip
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import models
import psutil
import pytest
import yaml
import zstandard
from clients import load
from servers import ROOT, RunningServer, free_port, wait_until
from test_clients import conformance, passed
from test_load import body, numbers
from test_service import ASKED

from transport import Reply

pytest.importorskip("ray.serve", reason="make test-ray runs these")
pytestmark = pytest.mark.timeout(600)

ray_app = importlib.import_module("deploy.ray_app")
ray = ray_app.ray

DECIDER = "ray::ServeReplica:blink:Decider"


# --- a cluster -------------------------------------------------------------------------------------------------------


class Cluster:
    """A Ray head on the loopback with `deploy/ray.yaml`, of which the tests change port, machine and model."""

    def __init__(self, head: psutil.Process, app: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.head = head
        self.server = RunningServer(app, port, log)

    def deciders(self) -> list[psutil.Process]:
        found = []
        for process in self.head.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] and process.cmdline()[0].startswith(DECIDER):
                    found.append(process)
        return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        _, alive = psutil.wait_procs(below, timeout=10)
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    port, own = free_port(), free_port()
    config = yaml.safe_load((ROOT / "deploy" / "ray.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"] |= {"gpus": 0, "cpus": 1, "flags": f"--model {models.tiny_qwen35()} --continuous"}
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    head_flags = ["--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(own), "--num-cpus", "4"]
    head_flags += ["--object-store-memory", "100000000", "--include-dashboard", "false"]
    with contextlib.ExitStack() as stack:
        # Ray's sockets live there, whose paths may have 107 characters.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)))
        (folder / "ray.yaml").write_text(yaml.safe_dump(config))
        log = stack.enter_context((folder / "log").open("wb"))

        def start(name: str, *args: str | Path) -> subprocess.Popen[bytes]:
            command = [Path(sys.executable).with_name(name), *args]
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            stack.callback(end, process)
            return process

        head = start("ray", "start", *head_flags, "--temp-dir", folder)
        wait_until(lambda: "will now block" in (folder / "log").read_text(), 60)
        app = start("serve", "run", "--address", f"127.0.0.1:{own}", folder / "ray.yaml")
        made = Cluster(psutil.Process(head.pid), app, port, folder / "log")
        made.server.wait_ready()
        wait_until(lambda: len(made.deciders()) == 2, 60)
        yield made


def asked(server: RunningServer, method: str, path: str, data: bytes, headers: dict[str, str]) -> tuple[int, Any, Any]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    text = answer.read()
    assert answer.headers["x-typesafe-request-id"].startswith("req_")
    assert answer.headers["Content-Type"] == "application/json"
    chosen = {name: answer.headers[name] for name in ("Allow", "Retry-After", "Accept-Encoding")}
    connection.close()
    return answer.status, chosen, json.loads(text) if text else None


@pytest.mark.parametrize("number", range(6))
def test_the_answers_are_those_of_the_server(cluster: Cluster, server: RunningServer, number: int) -> None:
    data = json.dumps(body(number)).encode()
    (status, _, ours), (_, _, theirs) = (
        asked(one, "POST", "/v1/systemone", data, {}) for one in (cluster.server, server)
    )
    assert status == 200
    assert (ours["model"], ours["usage"]) == (theirs["model"], theirs["usage"])
    for name, expected in numbers(theirs).items():
        assert numbers(ours)[name] == pytest.approx(expected, abs=1e-4)


GOOD = json.dumps(ASKED).encode()


@pytest.mark.parametrize(
    ("method", "path", "data", "headers"),
    [
        ("POST", "/v1/systemone", gzip.compress(GOOD), {"Content-Encoding": "gzip"}),
        ("POST", "/v1/systemone", zstandard.compress(GOOD), {"Content-Encoding": "zstd"}),
        ("POST", "/v1/systemone?x=1", GOOD, {}),
        ("POST", "/v1/systemone", b"{", {}),
        ("POST", "/v1/systemone", b"", {}),
        ("POST", "/v1/systemone", b'{"state": 1, "questions": {}}', {}),
        ("POST", "/v1/systemone", b"nonsense", {"Content-Encoding": "gzip"}),
        ("POST", "/v1/systemone", GOOD, {"Content-Encoding": "br"}),
        ("POST", "/v1/systemone", GOOD, {"Content-Type": "multipart/form-data; boundary=x"}),
        ("POST", "/v1/systemone", b" " * (21 << 20), {}),
        ("GET", "/v1/systemone", b"", {}),
        ("GET", "/v1/models", b"", {}),
        ("HEAD", "/v1/models/", b"", {}),
        ("DELETE", "/v1/models", b"", {}),
        ("GET", "/v1/nothing", b"", {}),
    ],
)
def test_replies_are_those_of_the_server(
    cluster: Cluster, server: RunningServer, method: str, path: str, data: bytes, headers: dict[str, str]
) -> None:
    ours, theirs = (asked(one, method, path, data, headers) for one in (cluster.server, server))
    if theirs[0] == 200 and method == "POST":
        assert ours[2]["answers"]["q"]["noul"] == pytest.approx(theirs[2]["answers"]["q"]["noul"], abs=1e-4)
    else:
        assert ours == theirs


def test_conformance(cluster: Cluster, tmp_path: Path) -> None:
    report = conformance(cluster.server, tmp_path / "report.json")
    assert passed(report, "MUST") == (32, 32)
    assert passed(report, "SHOULD") == (11, 12)


def test_a_killed_replica_costs_no_answer(cluster: Cluster) -> None:
    before = cluster.deciders()
    assert len(before) == 2
    with load(cluster.server.port) as made:
        made.wait_for(200)
        before[0].kill()
        made.wait_for(200)
        wait_until(lambda: len(cluster.deciders()) == 2 and before[0] not in cluster.deciders(), 60)
        made.wait_for(200)
    assert set(made.seen) == {"200"}, made.seen
    print(f"{made.seen.total()} requests, none failed")
    assert "fog" not in cluster.server.stderr  # what they asked


# --- a front without a cluster ---------------------------------------------------------------------------------------


class Deciders:
    """Stands for the replicas: each call takes the next of the outcomes."""

    def __init__(self, *outcomes: Reply | Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.decide = self.health = self

    async def remote(self, *args: Any) -> Reply:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            await asyncio.sleep(60)
        assert outcome is not None
        return outcome


def answer(
    deciders: Deciders, method: str = "POST", path: str = "/v1/systemone", flags: str = "", key: str = ""
) -> Any:
    """A front's response to a request without a body."""
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "server": ("blink", 80),
        "headers": [(b"authorization", key.encode())] if key else [],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    front = ray_app.Front(f"--model {models.tiny_qwen35()} {flags}", deciders)
    return asyncio.run(front(ray_app.Request(scope, receive)))


LOST = ray.exceptions.ActorDiedError()
BUSY = Reply(503, b"{}", {"Retry-After": "1"})
DONE = Reply(200, b"{}")
FULL = ray.serve.exceptions.BackPressureError(num_queued_requests=1, max_queued_requests=1)


@pytest.mark.parametrize(
    ("outcomes", "flags", "status"),
    [
        ([LOST, LOST, DONE], "", 200),
        ([LOST, LOST, LOST, DONE], "", 503),
        ([BUSY, DONE], "", 200),
        ([BUSY, BUSY, BUSY, DONE], "", 503),
        ([Reply(500, b"{}"), DONE], "", 500),
        ([FULL, DONE], "", 503),
        ([RuntimeError("fog"), DONE], "", 500),
        ([None], "--request-timeout-s 1", 504),
    ],
)
def test_what_a_front_makes_of_its_replicas(outcomes: list[Any], flags: str, status: int) -> None:
    response = answer(Deciders(*outcomes), flags=flags)
    assert response.status_code == status
    assert response.headers.get("Retry-After") == ("1" if status == 503 else None)
    assert b"fog" not in response.body


def test_a_front_asks_for_the_key() -> None:
    for path, method in (("/v1/systemone", "POST"), ("/v1/models", "GET")):
        for key, status in (("", 401), ("Bearer no", 401), ("Bearer yes", 200)):
            response = answer(Deciders(DONE), method, path, "--api-key yes", key)
            assert (response.status_code, response.headers.get("WWW-Authenticate")) == (
                status,
                "Bearer" if status == 401 else None,
            )


@pytest.mark.parametrize("outcome", [LOST, None])
def test_a_front_without_replicas_is_loading(outcome: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_app, "_HEALTH_S", 0.1)
    response = answer(Deciders(outcome), "GET", "/healthz")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert json.loads(response.body)["status"] == "loading"


def test_bad_flags_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="--no-such-flag"):
        ray_app.app(ray_app.Settings(flags="--no-such-flag"))
