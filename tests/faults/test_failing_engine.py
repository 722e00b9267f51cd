"""What becomes of a server whose engine fails: it answers, says how it is, and goes on where it can.

Proven elsewhere: one request's fault leaves its neighbours alone (`test_batcher.py`, `test_blink.py`: raised, not
finite, out of memory; `test_fast_body.py`: out of memory in the packed pass), 500 tells a request id and no text
(`test_transport.py`), an engine that dies ends the process with 1 after an answer to all, and one that hangs ends
with 1 after its time to drain (`test_lifecycle.py`).
"""

import json
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from servers import StartServer, wait_until
from test_batcher import GatedEngine
from test_serve import run_serve
from test_service import ASKED, get
from test_service import post as ask
from test_transport import HEALTH, Running, answers, post, running

from answers import Scores
from prompts import Prompts
from reference import EngineError


def health(server: Running) -> tuple[int, str, bool]:
    with server.connect() as connection:
        connection.sendall(HEALTH)
        ((status, _, body),) = answers(connection, 1)
    told = json.loads(body)
    return status, told["status"], told["queue"]["worker_alive"]


def test_a_hanging_engine_takes_the_server_out_until_it_moves() -> None:
    with running(timeout_s=0.5) as made, made.connect() as first, made.connect() as second:
        first.sendall(post())
        assert answers(first, 1)[0][0] == 504
        wait_until(lambda: health(made) == (503, "failed", False))
        began = time.monotonic()
        second.sendall(post())
        status, headers, _ = answers(second, 1)[0]
        assert (status, headers["retry-after"]) == (503, "1")  # at once: it would only wait for nothing
        assert time.monotonic() - began < 0.4
        assert made.batcher.queued() == 0
        made.engine.gate.set()
        wait_until(lambda: health(made) == (200, "ok", True))
        first.sendall(post())
        assert answers(first, 1)[0][0] == 200


def test_many_short_passes_are_no_hanging_one() -> None:
    with running(timeout_s=0.5) as made, made.connect() as connection:
        made.engine.gate.set()
        made.engine.fault = lambda batch: time.sleep(0.1)
        connection.sendall(post() * 10)
        assert {status for status, *_ in answers(connection, 10)} == {200}
        assert health(made) == (200, "ok", True)


def out_of_memory(prompts: Prompts) -> Scores | Exception:
    return EngineError("out of memory")


def not_finite(prompts: Prompts) -> Scores | Exception:
    return EngineError("the model gave logits that are not finite")


@pytest.mark.parametrize("outcome", [out_of_memory, not_finite])
def test_a_failed_request_is_500_and_the_next_is_decided(
    outcome: Callable[[Prompts], Scores | Exception], caplog: pytest.LogCaptureFixture
) -> None:
    engine = GatedEngine()
    engine.gate.set()
    good = engine.outcome
    with running(engine=engine) as made, made.connect() as connection:
        engine.outcome = outcome  # type: ignore[method-assign]
        connection.sendall(post())
        ((status, headers, body),) = answers(connection, 1)
        assert (status, json.loads(body)["detail"]["error_type"]) == (500, "api_error")
        assert headers["x-typesafe-request-id"] in json.loads(body)["error"]
        engine.outcome = good  # type: ignore[method-assign]
        connection.sendall(post())
        assert answers(connection, 1)[0][0] == 200
        assert health(made) == (200, "ok", True)
    assert "fog" not in caplog.text


def test_weights_that_give_no_numbers_end_the_start(tiny_qwen35: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen35, folder)
    (folder / "weights.sha256").unlink()
    file = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    save_file(tensors | {name: tensors[name] * torch.nan}, file, metadata={"format": "pt"})
    ended = run_serve("--model", str(folder), "--port", "0")
    assert ended.returncode == 1
    assert "not finite" in ended.stderr.strip().splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_real_pass_without_memory_is_500_and_the_next_is_decided(start_server: StartServer) -> None:
    long = {"state": "word " * 30_000, "questions": ASKED["questions"]}
    with start_server() as server:
        process = psutil.Process(server.process.pid)
        ask(server.url, ASKED)
        free = process.rlimit(resource.RLIMIT_AS)
        process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms + (64 << 20), free[1]))
        status, headers, body = ask(server.url, long)
        assert status == 500, body
        assert headers["x-typesafe-request-id"] in body["error"]
        assert ask(server.url, ASKED)[0] == 200
        assert json.loads(get(f"{server.url}/healthz")[2])["ok"]
        process.rlimit(resource.RLIMIT_AS, free)
        assert ask(server.url, long)[0] == 200
        assert "word" not in server.stderr
        assert "Traceback" not in server.stderr
