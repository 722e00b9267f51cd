"""Real processes from start to end: signals, draining, a worker that dies, many clients at once."""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from servers import ROOT, RunningServer, StartServer, free_port

QUESTIONS = {
    "late": {"type": "noul", "instructions": "Is it late?"},
    "kind": {"type": "choice", "criteria": {"boat": "a boat", "gate": "a gate", "bill": None}},
}


def body(number: int) -> bytes:
    return json.dumps({"state": f"case {number}: {'word ' * (number % 17)}", "questions": QUESTIONS}).encode()


def ask(connection: HTTPConnection, number: int) -> tuple[int, Any]:
    connection.request("POST", "/v1/systemone", body(number))
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def numbers(answer: Any) -> list[float]:
    answers = answer["answers"]
    return [answers["late"]["noul"], *answers["kind"]["probabilities"].values()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_with_0(start_server: StartServer, number: int) -> None:
    with start_server() as running:
        running.process.send_signal(number)
        assert running.process.wait(60) == 0


def test_a_loading_server_ends_with_0(start_server: StartServer) -> None:
    with start_server(wait=False) as running:
        deadline = time.monotonic() + 60
        while "loading" not in running.stderr:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0


def test_loading_is_503_with_progress(start_server: StartServer) -> None:
    with start_server(wait=False) as running:
        seen = []
        while not seen or seen[-1][0] != 200:
            assert running.process.poll() is None
            try:
                with urllib.request.urlopen(f"{running.url}/healthz", timeout=30) as answer:
                    seen.append((answer.status, json.load(answer)))
            except urllib.error.HTTPError as error:
                seen.append((error.code, json.load(error)))
            except OSError:
                time.sleep(0.01)
        loading = [health for status, health in seen if status == 503]
        assert loading
        assert all(not health["ok"] and health["status"] == "loading" for health in loading)
        progress = [health["progress"] for health in loading]
        assert progress == sorted(progress)


def test_stopping_under_load_loses_nothing(start_server: StartServer) -> None:
    with start_server("--continuous") as running:
        statuses: list[int] = []
        lost: list[int] = []
        signalled = threading.Event()

        def client(first: int) -> None:
            connection = HTTPConnection("127.0.0.1", running.port, timeout=60)
            for number in range(first, first + 10_000):
                sent_before = not signalled.is_set()
                try:
                    statuses.append(ask(connection, number)[0])
                except OSError:
                    if sent_before and not signalled.is_set():
                        lost.append(number)
                    return
                except Exception:  # the connection ended between two requests
                    return

        threads = [threading.Thread(target=client, args=(i * 10_000,)) for i in range(8)]
        for thread in threads:
            thread.start()
        while len(statuses) < 60:
            time.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
        signalled.set()
        assert running.process.wait(60) == 0
        for thread in threads:
            thread.join(60)
        assert not lost
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) >= 60


def test_a_dead_worker_ends_the_process(tiny_qwen35: Path, tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(
        f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import serve
from batcher import Batcher
from test_batcher import GatedEngine

args = serve.parse_args(["--model", {str(tiny_qwen35)!r}, "--port", sys.argv[1]])
service = serve.Service(name="m", api_key=None, max_body_bytes=4096, max_connections=8, request_timeout_s=60)

def start(on_death):
    engine = GatedEngine()
    engine.gate.set()
    def fault(batch):
        raise SystemExit("the engine is gone")
    engine.fault = fault
    service.decider = Batcher(engine, on_death=on_death)
    service.status = "ok"

sys.exit(serve.run(service, args, start))
"""
    )
    port = free_port()
    process = subprocess.Popen([sys.executable, str(script), str(port)], stderr=subprocess.PIPE, text=True)
    running = RunningServer(process, port, tmp_path / "log")
    running.wait_ready()
    status, answer = ask(HTTPConnection("127.0.0.1", port, timeout=60), 1)
    assert status == 503
    assert answer["detail"]["error_type"] == "overloaded_error"
    assert process.wait(60) == 1
    assert process.stderr is not None
    assert "the decision worker died" in process.stderr.read()


def test_many_clients_get_their_own_answers(server: RunningServer, start_server: StartServer) -> None:
    alone = HTTPConnection("127.0.0.1", server.port, timeout=60)
    expected = {number: numbers(ask(alone, number)[1]) for number in range(60)}
    assert len({round(values[0], 3) for values in expected.values()}) > 20

    for flags, grouped in ((), False), (("--batch-window-ms", "5"), True), (("--continuous",), True):
        with start_server(*flags, "--max-queued-requests", "128") as running:

            def one(number: int, port: int = running.port) -> tuple[int, int, Any]:
                return number, *ask(HTTPConnection("127.0.0.1", port, timeout=120), number)

            with ThreadPoolExecutor(24) as pool:
                for number, status, answer in pool.map(one, [n % 60 for n in range(240)]):
                    assert status == 200
                    assert numbers(answer) == pytest.approx(expected[number], abs=1e-4)
            with urllib.request.urlopen(f"{running.url}/metrics", timeout=60) as metrics:
                lines = dict(line.rsplit(" ", 1) for line in metrics.read().decode().splitlines() if line[0] != "#")
            passes, requests = (float(lines[f"blink_batch_requests_{name}"]) for name in ("count", "sum"))
            assert requests == 240
            assert (passes < 200) == grouped
