"""`serve_vllm.py` over the real vLLM, on the processor: what `make test-vllm` runs, in an environment of its own."""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import models
import psutil
import pytest
import questions
from servers import RunningServer, start_server
from test_clients import conformance, passed, unmet
from test_service import get, post

pytest.importorskip("vllm.v1.engine.async_llm", reason="make test-vllm runs these")
pytestmark = pytest.mark.timeout(900)

MARK = "BLINK_TEST_MARK"
FLAGS = ["--max-model-len", "8192", "--max-num-batched-tokens", "4096", "--max-num-seqs", "16"]
MEAN, LARGEST = 0.001, 0.05  # bfloat16 moves a probability by 0.0004; one among 600 by 0.02, depending on the processor
Start = Callable[..., AbstractContextManager[RunningServer]]


@pytest.fixture(scope="session")
def model() -> Path:
    """Head sizes that vLLM's kernels for the processor know; answers flat enough that bfloat16 does not move them."""
    return models.tiny_qwen35(head_dim=64, linear_head_dim=128, sharpness=0.6)


@pytest.fixture(scope="session")
def start(model: Path) -> Start:
    """Starts `serve_vllm.py`; all its processes carry a mark in their environment."""

    def one(*flags: str, mark: str, wait: bool = True) -> AbstractContextManager[RunningServer]:
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", MARK: mark}
        return start_server(*FLAGS, *flags, script="serve_vllm.py", model=model, env=env, wait=wait)

    return one


@pytest.fixture(scope="session")
def server(start: Start) -> Iterator[RunningServer]:
    with start(mark="shared") as running:
        yield running
        assert len(marked("shared")) > 1  # vLLM's engine is a process of its own
        assert running.stop() == 0
    assert left("shared") == []


def marked(mark: str) -> list[str]:
    """Command lines of the living processes that a server with this mark started, itself included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def left(mark: str) -> list[str]:
    """What is alive ten seconds after a server's end: multiprocessing's own helper tidies up after it."""
    deadline = time.monotonic() + 10
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    return marked(mark)


def probabilities(answers: dict[str, Any]) -> dict[tuple[str, str], float]:
    """The label probabilities in the answers of a response, by question and option."""
    found: dict[tuple[str, str], float] = {}
    for name, answer in answers.items():
        options = {"noul": answer["noul"]} if "noul" in answer else answer["probabilities"]
        found |= {(name, option): p for option, p in options.items()}
    return found


def decide(server: RunningServer, body: dict[str, Any]) -> dict[tuple[str, str], float]:
    status, _, answer = post(server.url, body)
    assert status == 200, answer
    return probabilities(answer["answers"])


def compare(ones: list[dict[tuple[str, str], float]], others: list[dict[tuple[str, str], float]]) -> None:
    """Assert that the probabilities are the same but for what bfloat16 moves, and print how far apart they are."""
    assert [list(one) for one in ones] == [list(other) for other in others]
    apart = [abs(one[key] - other[key]) for one, other in zip(ones, others, strict=True) for key in one]
    mean, largest = statistics.mean(apart), max(apart)
    print(f"\n{len(apart)} probabilities: mean difference {mean:.5f}, largest {largest:.4f}")
    assert mean <= MEAN
    assert largest <= LARGEST


@pytest.fixture(scope="session")
def alone(server: RunningServer) -> list[dict[tuple[str, str], float]]:
    """Answers to the sixty questions, one request at a time."""
    return [decide(server, body) for body in questions.requests()]


def test_health_names_vllm_and_what_it_does(server: RunningServer) -> None:
    health = json.loads(get(f"{server.url}/healthz")[2])
    assert (health["engine"], health["accepts_images"]) == ("vllm", False)
    assert health["vllm"]["version"] == health["versions"]["vllm"]
    effective = {"head_dtype": "float32", "max_model_len": 8192, "enable_prefix_caching": False}
    assert health["vllm"] | effective == health["vllm"]
    assert health["vllm"]["enable_chunked_prefill"] is True
    assert health["warmup"]["repeat_identical"] is True


def test_the_probabilities_are_those_of_the_torch_engine(
    server: RunningServer, model: Path, alone: list[dict[tuple[str, str], float]]
) -> None:
    import torch

    from blink import TorchEngine

    engine = TorchEngine(model, "cpu", dtype=torch.float32)
    asked = questions.requests()
    ours = [probabilities(engine.decide(body["state"], body["questions"])["answers"]) for body in asked]
    counted = sum(len(body["questions"]) for body in asked)
    spread = max(abs(a - b) for one in ours for a in one.values() for b in one.values())
    assert counted == 60
    assert spread > 0.3  # else everything would be alike
    compare(ours, alone)


def test_sixteen_clients_get_the_answers_of_one(
    server: RunningServer, alone: list[dict[tuple[str, str], float]]
) -> None:
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda body: decide(server, body), questions.requests()))
    compare(alone, together)


def test_conformance(server: RunningServer, tmp_path: Path) -> None:
    report = conformance(server, tmp_path / "report.json")
    print(f"\njevcompat: MUST {passed(report, 'MUST')}, SHOULD {passed(report, 'SHOULD')}")
    assert passed(report, "MUST") == (32, 32)
    assert unmet(report, "fail") == {"errors.validation-shape"}


def test_a_question_over_the_context_is_refused(server: RunningServer) -> None:
    question = {"type": "noul", "instructions": "Is it late?"}
    long = {"state": "word " * 9000, "questions": {"q": question}}
    status, _, answer = post(server.url, long)
    assert status == 422
    assert "maximum context length" in answer["error"]
    status, _, answer = post(server.url, long | {"state": "word", "images": []})
    assert status == 422
    assert "this model reads text only" in answer["error"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads other processes' environment")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_leaves_nothing(start: Start, number: int) -> None:
    mark = f"start-{number}-{os.getpid()}"
    with start(mark=mark, wait=False) as running:
        deadline = time.monotonic() + 300
        while len(marked(mark)) < 2:  # the engine's process is coming up
            assert running.process.poll() is None, running.stderr
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        running.process.send_signal(number)
        assert running.process.wait(60) == 0
    assert left(mark) == []
