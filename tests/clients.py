"""Clients that ask a server as fast as they are answered, and what they saw."""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

CLIENTS = 12
ASKED = json.dumps({"state": "fog", "questions": {"late": {"type": "noul", "instructions": "Is it late?"}}})


def ask(connection: HTTPConnection, body: str = ASKED) -> tuple[int, Any, Any]:
    connection.request("POST", "/v1/systemone", body)
    answer = connection.getresponse()
    return answer.status, answer.headers, json.loads(answer.read())


@dataclass
class Load:
    """Clients at a port; what they saw is a status or the name of an error."""

    port: int
    seen: Counter[str] = field(default_factory=Counter)
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def client(self) -> None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self.stopping.is_set():
            try:
                status, _, answer = ask(connection)
                outcome = str(status) if status != 200 or answer["answers"]["late"]["type"] == "noul" else "no answer"
            except Exception as error:
                outcome = type(error).__name__
                connection.close()
            with self._lock:
                self.seen[outcome] += 1

    def wait_for(self, more: int) -> None:
        """Return when so many more have been answered."""
        goal = self.seen.total() + more
        deadline = time.monotonic() + 60
        while self.seen.total() < goal:
            assert time.monotonic() < deadline, self.seen
            time.sleep(0.01)


@contextlib.contextmanager
def load(port: int) -> Iterator[Load]:
    made = Load(port)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(made.client) for _ in range(CLIENTS)]
        try:
            yield made
        finally:
            made.stopping.set()
        for one in clients:
            one.result(60)
