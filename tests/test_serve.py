"""The command: settings, checked weights, the port."""

import argparse
import hashlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from servers import ROOT, RunningServer

import serve


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


# --- the port ---------------------------------------------------------------------------------------------------------


def test_a_port_in_use_ends_the_start(server: RunningServer, tiny_qwen35: Path) -> None:
    ended = run_serve("--model", str(tiny_qwen35), "--port", str(server.port))
    assert ended.returncode == 1
    assert f"port {server.port}" in ended.stderr.strip().splitlines()[-1]


def test_both_families_of_the_loopback(server: RunningServer) -> None:
    for host in ("127.0.0.1", "::1"):
        with socket.create_connection((host, server.port), timeout=60) as connection:
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
