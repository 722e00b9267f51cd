"""The command over a stand-in for vLLM: settings, what vLLM makes of them, and that no process is ever left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from servers import ROOT, RunningServer, StartServer
from test_service import ASKED, HEALTH_KEYS, get, post

import serve_vllm
from serve import StartError

FAKE = Path(__file__).parent / "fake"

# --- settings --------------------------------------------------------------------------------------------------------


def test_the_known_command_line(tiny_qwen35: Path) -> None:
    args = serve_vllm.parse_args(
        f"--model {tiny_qwen35} --port 8000 --quantization auto --max-concurrency 32 --max-num-seqs 32 "
        "--max-num-batched-tokens 8192 --gpu-memory-utilization 0.85 --max-model-len 32768".split()
    )
    defaults = serve_vllm.parse_args(["--model", str(tiny_qwen35)])
    assert len(args.keys) == len(defaults.keys) == 0
    args.keys = defaults.keys
    assert vars(args) == vars(defaults)
    settings = serve_vllm.engine_settings(tiny_qwen35, args)
    assert settings == {
        "model": str(tiny_qwen35),
        "dtype": "bfloat16",
        "quantization": None,
        "hf_overrides": {"head_dtype": "float32"},
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 255,
        "max_model_len": 32768,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.85,
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "disable_log_stats": True,
        "shutdown_timeout": 30,
    }


def test_flags_reach_vllm(tiny_qwen35: Path) -> None:
    flags = "--tensor-parallel-size 2 --data-parallel-size 4 --prefix-cache --no-chunked-prefill --max-model-len 4096"
    args = serve_vllm.parse_args(["--model", str(tiny_qwen35), *flags.split(), "--quantization", "fp8"])
    settings = serve_vllm.engine_settings(tiny_qwen35, args)
    asked = {
        "tensor_parallel_size": 2,
        "data_parallel_size": 4,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": False,
        "max_model_len": 4096,
        "quantization": "fp8",
    }
    assert settings | asked == settings


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--max-num-seqs 0", "--max-num-seqs: should be a whole number from 1"),
        ("--gpu-memory-utilization 1.5", "above 0 and at most 1"),
        ("--gpu-memory-utilization nan", "above 0 and at most 1"),
        ("--gpu-memory-utilization much", "above 0 and at most 1"),
        ("--no-chunked-prefill", "--max-num-batched-tokens of at least --max-model-len"),
        ("--model no/such/folder", "no folder"),
        ("--continuous", "unrecognized"),
    ],
)
def test_bad_flags(tiny_qwen35: Path, flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serve_vllm.parse_args(["--model", str(tiny_qwen35), *flags.split()])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}}, "compressed-tensors"),
        ({"text_config": None, "quantization_config": None}, None),
    ],
)
def test_quantization_is_recognised(tmp_path: Path, config: dict[str, Any], method: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert serve_vllm.quantization(tmp_path, "auto") == method
    assert serve_vllm.quantization(tmp_path, "fp8") == "fp8"


def test_untested_quantization_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(StartError, match="--quantization gptq"):
        serve_vllm.quantization(tmp_path, "auto")


def config(settings: dict[str, Any], **differing: Any) -> Any:
    found = settings | {"dtype": "torch.bfloat16", "head_dtype": "torch.float32"} | differing
    part = SimpleNamespace(**found)
    return SimpleNamespace(model_config=part, cache_config=part, scheduler_config=part, parallel_config=part)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "torch.float16"),
        ("quantization", "fp8"),
        ("head_dtype", "torch.bfloat16"),
        ("logprobs_mode", "raw_logprobs"),
        ("max_model_len", 16384),
        ("enable_prefix_caching", True),
        ("enable_chunked_prefill", False),
    ],
)
def test_other_settings_than_asked_stop_the_start(tiny_qwen35: Path, name: str, value: Any) -> None:
    asked = serve_vllm.engine_settings(tiny_qwen35, serve_vllm.parse_args(["--model", str(tiny_qwen35)]))
    serve_vllm.check_effective(asked, serve_vllm.effective_settings(config(asked)))
    with pytest.raises(StartError, match=name):
        serve_vllm.check_effective(asked, serve_vllm.effective_settings(config(asked, **{name: value})))


# --- the process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path, start_server: StartServer) -> Any:
    """Starts `serve_vllm.py` over the stand-in, which behaves as the keywords say; `flags` go to the command."""

    def start(*flags: str, wait: bool = True, **plan: Any) -> Any:
        env = {"PYTHONPATH": str(FAKE), "FAKE_VLLM": json.dumps({"death": str(tmp_path / "death")} | plan)}
        return start_server(*flags, script="serve_vllm.py", env=env, wait=wait)

    return start


@pytest.fixture
def no_process_is_left() -> Iterator[list[psutil.Process]]:
    """The test adds processes; when it has ended they must have, too."""
    seen: list[psutil.Process] = []
    yield seen
    assert seen, "the test saw no process"
    _, alive = psutil.wait_procs(seen, timeout=20)
    assert [process.cmdline() for process in alive] == []


def wait_for_processes(running: RunningServer) -> list[psutil.Process]:
    """The engine's processes, once they are up."""
    deadline = time.monotonic() + 120
    while "fake engine: processes are up" not in running.stderr:
        assert running.process.poll() is None, running.stderr
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return psutil.Process(running.process.pid).children(recursive=True)


def test_a_whole_life(fake: Any, no_process_is_left: list[psutil.Process]) -> None:
    with fake("--max-concurrency", "5") as running:
        no_process_is_left += wait_for_processes(running)
        assert len(no_process_is_left) == 2
        status, _, body = get(f"{running.url}/healthz")
        health = json.loads(body)
        assert status == 200
        assert list(health) == [*HEALTH_KEYS, "vllm"]
        assert health["versions"]["vllm"] == health["vllm"]["version"] == "0.0.fake"
        assert health["vllm"] | {"head_dtype": "float32", "max_model_len": 32768} == health["vllm"]
        assert (health["accepts_images"], health["limits"]["context_tokens"]) == (False, 32767)
        assert health["warmup"] == {"repeat_identical": True}
        assert health["queue"] == {"max_queued": 5, "worker_alive": True, "queued": 0}
        status, headers, answer = post(running.url, ASKED)
        assert status == 200
        assert 0 < answer["answers"]["q"]["noul"] < 1
        assert "forward;dur=" in headers["Server-Timing"]
        for picture in ({"images": []}, {"state": "data:image/png;base64,AAAA"}):
            status, _, answer = post(running.url, ASKED | picture)
            assert status == 422
            assert "this model reads text only" in answer["error"]
        assert running.stop() == 0
        assert "secret" not in running.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_leaves_nothing(
    fake: Any, no_process_is_left: list[psutil.Process], number: int
) -> None:
    with fake(wait=False, start_s=600) as running:
        no_process_is_left += wait_for_processes(running)
        assert get(f"{running.url}/healthz")[0] == 503
        running.process.send_signal(number)
        assert running.process.wait(60) == 0


def test_a_dead_engine_ends_the_process(fake: Any, no_process_is_left: list[psutil.Process], tmp_path: Path) -> None:
    with fake() as running:
        no_process_is_left += wait_for_processes(running)
        (tmp_path / "death").touch()
        assert running.process.wait(60) == 1
        assert "vLLM's engine died" in running.stderr
        assert "Traceback" not in running.stderr


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"effective": {"head_dtype": "torch.bfloat16"}}, "vLLM runs with head_dtype 'bfloat16' instead of 'float32'"),
        ({"effective": {"max_model_len": 8192}}, "max_model_len 8192 instead of 32768"),
        ({"fails": "no memory for it"}, "cannot be loaded: RuntimeError: no memory for it"),
    ],
)
def test_a_start_that_fails_leaves_nothing(
    fake: Any, no_process_is_left: list[psutil.Process], plan: dict[str, Any], words: str
) -> None:
    with fake(wait=False, start_s=0.5, **plan) as running:
        no_process_is_left += wait_for_processes(running)
        assert running.process.wait(60) == 1
        assert words in running.stderr.strip().splitlines()[-1]
        assert "Traceback" not in running.stderr


def test_without_vllm_the_start_says_what_to_install(tiny_qwen35: Path) -> None:
    script = f"""
import sys
sys.modules["vllm"] = None
import serve_vllm
serve_vllm.main(["--model", {str(tiny_qwen35)!r}, "--port", "0"])
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "pip install -r requirements-vllm.txt" in ended.stderr.strip().splitlines()[-1]


def test_tampered_weights_end_the_start_before_vllm(tiny_qwen35: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(tiny_qwen35, copy)
    with (copy / "config.json").open("a") as file:
        file.write(" ")
    env = os.environ | {"PYTHONPATH": str(FAKE), "FAKE_VLLM": "{}"}
    command = [sys.executable, str(ROOT / "serve_vllm.py"), "--model", str(copy), "--port", "0"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "do not match weights.sha256" in ended.stderr
    assert "fake engine" not in ended.stderr
