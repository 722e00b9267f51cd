"""Servers that run as processes of their own, for every room's tests."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import models
import pytest

ROOT = Path(__file__).parents[1]
JS = ROOT / "tests" / "js"
START_S = 240.0
STOP_S = 45.0
KEY = "harbour-key-7"
# A server under test sees none of these unless the test sets them.
_SETTINGS = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY")


@dataclass(frozen=True)
class RunningServer:
    """A server process that listens, or is about to."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def stderr(self) -> str:
        """What the process has written to stderr so far."""
        return self.log.read_text(errors="replace")

    def wait_ready(self) -> None:
        """Return when `/healthz` answers 200; fail the test if the process ends or takes too long."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with status {self.process.returncode}:\n{self.stderr}")
            try:
                with urllib.request.urlopen(f"{self.url}/healthz", timeout=10):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        pytest.fail(f"the server was not ready in {START_S:.0f} s:\n{self.stderr}")

    def stop(self) -> int:
        """Send SIGTERM and return the exit status; fail the test if the process does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the server did not end on SIGTERM:\n{self.stderr}")


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Return when the condition holds; fail if it takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


StartServer = Callable[..., AbstractContextManager[RunningServer]]


@contextmanager
def start_server(
    *args: str,
    model: Path | str | None = None,
    env: dict[str, str] | None = None,
    wait: bool = True,
    script: str = "serve.py",
    port: int | None = None,
) -> Iterator[RunningServer]:
    """Run a server's script with these arguments on a free port, by default with the tiny model; stop it at the end.

    Yields when the server is ready, or at once without `wait`. `env` is added to this process's own environment, from
    which the settings that the server reads are taken out.
    """
    settings = {name for name in os.environ if name in _SETTINGS or name.startswith("BLINK_")} - {"BLINK_CACHE"}
    kept = {name: value for name, value in os.environ.items() if name not in settings}
    environment = kept | {"BLINK_CACHE": str(mini_cache()), "OMP_NUM_THREADS": "2"} | (env or {})
    port = port or free_port()
    command = [sys.executable, str(ROOT / script), "--model", str(model or models.tiny_qwen35())]
    with tempfile.NamedTemporaryFile(prefix="server-", suffix=".log") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), *args],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        running = RunningServer(process, port, Path(log.name))
        try:
            if wait:
                running.wait_ready()
            yield running
        finally:
            running.stop()


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def mini_cache() -> Path:
    """Where tests keep the built-in model: BLINK_CACHE if it is set, else the checkout's own cache."""
    return Path(os.environ.get("BLINK_CACHE") or models.CACHE / "blink")
