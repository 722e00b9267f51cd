"""What goes wrong around a real server: its files, the clock, its clients.

Proven elsewhere: a full disk or no index while the built-in model is made (`mini/test_build.py`), tampered weights,
no model, a taken port (`test_serve.py`), a head or body that does not come in time, clients that leave or stay idle
(`test_transport.py`), signals while it loads or drains (`test_lifecycle.py`).
"""

import contextlib
import json
import os
import resource
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from servers import RunningServer, StartServer
from test_service import ASKED, get
from test_service import post as ask
from test_transport import answers, closed, post

import transport

CONNECTIONS = 2000
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # read with and without a conversion
def test_a_model_folder_changed_under_a_server(
    start_server: StartServer, tiny_qwen35: Path, tmp_path: Path, dtype: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen35, folder)
    with start_server("--dtype", dtype, model=folder) as server:
        before = ask(server.url, ASKED)[2]
        for path in folder.iterdir():
            with path.open("r+b") as file:  # the same file, as `cp` over it leaves it
                file.truncate(10)
        assert ask(server.url, ASKED)[2] == before
        shutil.rmtree(folder)
        assert ask(server.url, ASKED)[2] == before
        health = json.loads(get(f"{server.url}/healthz")[2])
        assert (health["ok"], health["weights_verified"]) == (True, True)


# --- the clock -------------------------------------------------------------------------------------------------------


def test_the_clock_steps_back(start_server: StartServer, tmp_path: Path) -> None:
    if not FAKETIME:
        if os.environ.get("CI") == "true":
            pytest.fail("libfaketime is missing")
        pytest.skip("needs libfaketime")
    clock = tmp_path / "clock"
    clock.write_text("@2030-06-01 12:00:00")
    env = {
        "LD_PRELOAD": str(FAKETIME[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # else threads that wait for a time spin, and starve the one that loads
    }
    with start_server("--batch-window-ms", "200", "--request-timeout-s", "20", env=env) as server:
        ask(server.url, ASKED)
        dates = []
        for day in ("2030-06-01", "2029-01-01", "2031-01-01", "1999-01-01"):
            clock.write_text(f"@{day} 12:00:00")
            began = time.monotonic()
            status, headers, answer = ask(server.url, ASKED)
            assert (status, answer["answers"]["q"]["type"]) == (200, "noul")
            assert time.monotonic() - began < 10
            stages = dict(part.strip().split(";dur=") for part in headers["Server-Timing"].split(","))
            assert all(0 <= float(milliseconds) < 10_000 for milliseconds in stages.values())
            dates.append(headers["Date"].split()[3])
            health = json.loads(get(f"{server.url}/healthz")[2])
            assert health["ok"]
            assert 0 < health["uptime_s"] < 300
        assert dates == ["2030", "2029", "2031", "1999"]


# --- clients ---------------------------------------------------------------------------------------------------------


def test_clients_that_send_a_byte_a_second(server: RunningServer) -> None:
    """Each holds a connection until its head's deadline, however diligent; nobody else waits for them."""
    dropped: list[float] = []

    def trickle() -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.settimeout(1.0)
            began = time.monotonic()
            for byte in post():
                with contextlib.suppress(ConnectionError):
                    connection.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    assert closed(connection)
                    dropped.append(time.monotonic() - began)
                    return

    slow = [threading.Thread(target=trickle) for _ in range(100)]
    for one in slow:
        one.start()
    slowest = 0.0
    while any(one.is_alive() for one in slow):
        began = time.monotonic()
        assert ask(server.url, ASKED)[0] == 200
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.2)
    assert slowest < 5
    assert len(dropped) == len(slow)
    assert transport.HEAD_S - 1 < min(dropped) <= max(dropped) < transport.HEAD_S + 5


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * CONNECTIONS)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_thousand_connections_at_once(server: RunningServer) -> None:
    """512 are taken, of whose requests 64 wait; everyone else is told to come back, and nothing stays behind."""
    process = psutil.Process(server.process.pid)
    ask(server.url, ASKED)
    threads, files = process.num_threads(), process.num_fds()
    with many_files(), contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            for _ in range(CONNECTIONS)
        ]
        for connection in opened:
            with contextlib.suppress(ConnectionError):  # refused already; what it was told is there to read
                connection.sendall(post())
        outcomes: Counter[str] = Counter()
        for connection in opened:
            try:
                ((status, headers, _),) = answers(connection, 1)
            except (ConnectionError, IndexError):
                outcomes["nothing"] += 1
                continue
            outcomes[str(status)] += 1
            assert headers.get("retry-after") == (None if status == 200 else "1")
        assert process.num_threads() - threads <= 600
    assert outcomes["200"] >= 64
    assert outcomes["200"] + outcomes["503"] == CONNECTIONS, outcomes
    deadline = time.monotonic() + 30
    while process.num_threads() > threads + 2 or process.num_fds() > files + 2:
        assert time.monotonic() < deadline, (process.num_threads(), threads, process.num_fds(), files)
        time.sleep(0.1)
    assert ask(server.url, ASKED)[0] == 200
