"""The command: settings, checked weights, health, keys, metrics, logs."""

import argparse
import hashlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from servers import KEY, ROOT, RunningServer, StartServer

import serve

HEALTH_KEYS = [
    *("ok", "status", "model", "revision", "weights_verified", "hub_offline", "warmup", "kernels", "versions"),
    *("batching", "device", "dtype", "engine", "limits", "queue", "api_key_required", "accepts_images", "uptime_s"),
]
ASKED = {"state": "a secret state", "questions": {"q": {"type": "noul", "instructions": "Is it late?"}}}


def get(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def post(url: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    request = urllib.request.Request(f"{url}/v1/systemone", data=json.dumps(body).encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, dict(answer.headers), json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), json.load(error)


def run_serve(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command to its end, in an environment without settings of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BLINK_", "HF_"))}
    command = [sys.executable, str(ROOT / "serve.py"), *args]
    return subprocess.run(command, env=kept | env, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("1000", 1000.0), ("2.5", 2.5)])
def test_windows(text: str, value: float) -> None:
    assert serve.window_ms(text) == value


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1000.1", "soon", ""])
def test_refused_windows(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="from 0"):
        serve.window_ms(text)


def test_whole_numbers() -> None:
    parse = serve.int_range(1, 64)
    assert [parse("1"), parse("64")] == [1, 64]
    for text in ("0", "65", "-1", "1.5", "+3", "many", "", "9" * 30):
        with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 64"):
            parse(text)


def test_a_bad_environment_value_does_not_block_a_flag(tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_BATCH_WINDOW_MS", "soon")
    args = serve.parse_args(["--model", str(tiny_qwen35), "--batch-window-ms", "5"])
    assert args.batch_window_ms == 5
    with pytest.raises(SystemExit):
        serve.parse_args(["--model", str(tiny_qwen35)])


def test_the_environment_sets_defaults(tiny_qwen35: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_MODEL", str(tiny_qwen35))
    monkeypatch.setenv("BLINK_API_KEY", "k")
    monkeypatch.setenv("BLINK_REVISION", "v1.4")
    monkeypatch.setenv("BLINK_TEMPERATURE", "2")
    args = serve.parse_args([])
    assert (args.model, args.api_key, args.revision, args.temperature) == (str(tiny_qwen35), "k", None, 2.0)
    assert serve.parse_args(["--model", "org/name"]).revision == "v1.4"


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (["--continuous", "--batch-window-ms", "5"], {}, "choose one"),
        (["--model", "./no/such/folder"], {}, "no folder"),
        (["--model", "tests"], {}, "config.json"),
        (["--port", "70000"], {}, "65535"),
        (["--max-batch-requests", "65"], {}, "from 1 to 64"),
        (["--max-queued-requests", "0"], {}, "from 1 to 1024"),
        (["--dtype", "int8"], {}, "invalid choice"),
        ([], {"BLINK_TEMPERATURE": "warm"}, "BLINK_TEMPERATURE"),
        ([], {"BLINK_TEMPERATURE": "-1"}, "BLINK_TEMPERATURE"),
        ([], {"BLINK_BATCH_WINDOW_MS": "nan"}, "milliseconds"),
    ],
)
def test_bad_settings_stop_before_anything_loads(
    args: list[str], env: dict[str, str], words: str, tiny_qwen35: Path
) -> None:
    ended = run_serve(*(["--model", str(tiny_qwen35)] if "--model" not in args else []), *args, **env)
    assert ended.returncode == 2
    assert words in ended.stderr.strip().splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert "loading" not in ended.stderr


def test_libraries_are_not_imported_before_the_offline_switch() -> None:
    script = "import serve, sys; print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_offline_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    serve.go_offline()
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert os.environ["TRANSFORMERS_OFFLINE"] == os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_versions_name_what_computes() -> None:
    assert list(serve.versions()) == ["torch", "transformers", "fla"]
    assert str(serve.versions()["transformers"]).startswith("5.")


# --- weights ---------------------------------------------------------------------------------------------------------


def listed(folder: Path, *lines: str) -> tuple[bool | None, list[str]]:
    (folder / "weights.sha256").write_text("\n".join(lines))
    return serve.verify(folder)


def test_weights_are_verified(tmp_path: Path) -> None:
    assert serve.verify(tmp_path) == (None, [])
    (tmp_path / "a").write_bytes(b"weights")
    (tmp_path / "b").write_bytes(b"more")
    good, more = (hashlib.sha256(data).hexdigest() for data in (b"weights", b"more"))
    assert serve.sha256(tmp_path / "a") == good
    assert listed(tmp_path, f"{good} a", f"{more.upper()}  *b", "") == (True, [])
    assert listed(tmp_path, f"{more} a", f"{more} b") == (False, ["a"])
    assert listed(tmp_path, f"{good} a", f"{good} gone") == (False, ["gone"])
    assert listed(tmp_path, "") == (False, ["weights.sha256"])
    assert listed(tmp_path, "not a digest") == (False, ["weights.sha256"])
    for name in ("../a", "/etc/hostname", "x/../../a", "..\\a"):
        assert listed(tmp_path, f"{good} {name}") == (False, [name])


def test_tampered_weights_end_the_start(tiny_qwen35: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(tiny_qwen35, copy)
    with (copy / "config.json").open("a") as file:
        file.write(" ")
    ended = run_serve("--model", str(copy), "--port", "0")
    assert ended.returncode == 1
    assert "config.json" in ended.stderr.strip().splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_folder_that_is_no_model_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ended = run_serve("--model", str(tmp_path), "--port", "0")
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1].startswith("blink: ")


# --- health, keys, metrics, logs -------------------------------------------------------------------------------------


def test_health(server: RunningServer) -> None:
    for path in ("/healthz", "/health", "/healthz/", "/healthz?probe=1"):
        status, headers, body = get(server.url + path)
        health = json.loads(body)
        assert status == 200
        assert list(health) == HEALTH_KEYS
    assert (health["ok"], health["status"], health["batching"]) == (True, "ok", None)
    assert (health["weights_verified"], health["hub_offline"]) == (True, True)
    assert health["warmup"] == {"repeat_identical": True}
    assert (health["device"], health["dtype"]) == ("cpu", "float32")
    assert health["engine"].startswith("reference")
    assert health["queue"] == {"max_queued": 64, "worker_alive": True, "queued": 0}
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("HEAD", "/healthz")
    head = connection.getresponse()
    assert (head.status, head.read()) == (200, b"")
    assert int(head.headers["Content-Length"]) > 100
    assert headers["Server"] == "blink"


def test_health_of_other_states() -> None:
    service = serve.Service(
        name="m", api_key="k", max_body_bytes=1, max_connections=1, request_timeout_s=1, progress=0.25
    )
    loading = service.health()
    assert list(loading) == [*HEALTH_KEYS, "progress"]
    assert (loading["ok"], loading["status"], loading["progress"]) == (False, "loading", 0.25)
    assert loading["api_key_required"] is True
    for status in ("draining", "failed", "ok"):  # ok without a living worker is a failure
        service.status = status
        health = service.health()
        assert (health["ok"], health["status"]) == (False, "failed" if status == "ok" else status)
        with pytest.raises(serve.wire.BlinkError) as caught:
            service.ready_decider()
        assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})


def test_keys(keyed_server: RunningServer) -> None:
    running, key = keyed_server, KEY
    for header in ("", f"Bearer {key}x", f"Basic {key}", key, "Bearer", "Bearer ключ".encode().decode("latin-1")):
        for status, headers, body in (
            post(running.url, ASKED, **({"Authorization": header} if header else {})),
            get(f"{running.url}/v1/models", **({"Authorization": header} if header else {})),
        ):
            assert status == 401
            assert headers["WWW-Authenticate"] == "Bearer"
            detail = (body if isinstance(body, dict) else json.loads(body))["detail"]
            assert detail["error_type"] == "authentication_error"
    assert post(running.url, ASKED, Authorization=f"bearer {key}")[0] == 200
    assert get(f"{running.url}/v1/models", Authorization=f"Bearer {key}")[0] == 200
    assert get(f"{running.url}/healthz")[0] == get(f"{running.url}/metrics")[0] == 200


def test_metrics_timing_and_quiet_logs(start_server: StartServer) -> None:
    with start_server("--access-log", "--batch-window-ms", "1", "--model-name", "ours") as running:
        status, headers, answer = post(running.url, ASKED)
        assert (status, answer["model"]) == (200, "ours")
        stages = dict(part.strip().split(";dur=") for part in headers["Server-Timing"].split(","))
        assert list(stages) == ["read", "parse", "render", "queue", "forward", "answer", "total"]
        assert all(math.isfinite(float(milliseconds)) for milliseconds in stages.values())
        refused, again, _ = post(running.url, {"state": "a secret state", "questions": {"q": "secret"}})
        assert refused == 422
        assert headers["x-typesafe-request-id"] != again["x-typesafe-request-id"]
        get(f"{running.url}/secret/path")
        text = get(f"{running.url}/metrics")[2].decode()
        assert 'blink_requests_total{path="/v1/systemone",status="200"} 1.0' in text
        assert 'blink_requests_total{path="/v1/systemone",status="422"} 1.0' in text
        assert 'blink_requests_total{path="other",status="404"} 1.0' in text
        assert 'blink_stage_seconds_count{stage="forward"} 1.0' in text
        assert "blink_batch_requests_count 1.0" in text
        assert "blink_questions_total 1.0" in text
        health = json.loads(get(f"{running.url}/healthz")[2])
        assert health["batching"] == {
            "window_ms": 1.0,
            "max_requests": 16,
            "max_queued": 64,
            "worker_alive": True,
            "queued": 0,
        }
        assert "/v1/systemone 200" in running.stderr
        assert "secret" not in running.stderr


def test_device_memory_is_shown_where_there_is_any() -> None:
    sizes = {"reserved": 7}
    metrics, without = serve.Metrics(lambda: 0), serve.Metrics(lambda: 0)
    metrics.watch_memory(lambda: sizes)
    without.watch_memory(dict)
    sizes["reserved"] = 9
    assert metrics.registry.get_sample_value("blink_device_memory_bytes", {"kind": "reserved"}) == 9
    assert "device_memory" not in generate_latest(without.registry).decode()


def test_no_access_lines_by_default(server: RunningServer) -> None:
    post(server.url, ASKED)
    assert "/v1/systemone" not in server.stderr
    assert "secret" not in server.stderr


def test_a_port_in_use_ends_the_start(server: RunningServer, tiny_qwen35: Path) -> None:
    ended = run_serve("--model", str(tiny_qwen35), "--port", str(server.port))
    assert ended.returncode == 1
    assert f"port {server.port}" in ended.stderr.strip().splitlines()[-1]


def test_both_families_of_the_loopback(server: RunningServer) -> None:
    for host in ("127.0.0.1", "::1"):
        with socket.create_connection((host, server.port), timeout=60) as connection:
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
