"""Log lines as text and as JSON, of the formatter and of a running server."""

import json
import logging
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest
from servers import ROOT, StartServer
from test_service import ASKED, get, post
from test_tracing import GOOD, ID, SPAN

import logs


def formatted(**more: Any) -> dict[str, Any]:
    record = logging.makeLogRecord({"name": "blink", "levelname": "INFO", "msg": "%s\nnext", "args": ("배",)} | more)
    text = logs.JsonFormatter().format(record)
    assert "\n" not in text
    line: dict[str, Any] = json.loads(text)
    return line


def test_json_lines() -> None:
    line = formatted(created=0.5, fields={"status": 200})
    assert list(line) == ["time", "level", "logger", "message", "status"]
    assert line["time"] == "1970-01-01T00:00:00.500+00:00"
    assert (line["level"], line["message"], line["status"]) == ("info", "배\nnext", 200)
    try:
        raise ValueError("why")
    except ValueError:
        assert "ValueError: why" in formatted(exc_info=sys.exc_info())["exception"]


def test_a_server_logs_json_with_traces(start_server: StartServer) -> None:
    with start_server("--log-format", "json", "--access-log") as running:
        _, headers, _ = post(running.url, ASKED, traceparent=GOOD)
        get(f"{running.url}/secret?secret", traceparent="00-not-a-trace-01")
        running.stop()
        lines = [json.loads(line) for line in running.stderr.splitlines()]
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    asked = next(line for line in lines if line.get("path") == "/v1/systemone")
    assert (asked["method"], asked["status"], asked["level"]) == ("POST", 200, "info")
    assert asked["duration_ms"] > 0
    assert (asked["request_id"], asked["trace_id"], asked["parent_id"]) == (
        headers["x-typesafe-request-id"],
        ID,
        SPAN,
    )
    other = next(line for line in lines if line.get("status") == 404)
    assert "trace_id" not in other
    assert "secret" not in json.dumps(lines)
    assert any("stopping" in line["message"] for line in lines)


def test_text_access_lines_name_the_trace(start_server: StartServer) -> None:
    with start_server("--access-log") as running:
        _, headers, _ = post(running.url, ASKED, traceparent=GOOD)
        running.stop()  # a line is written after its response
        assert f"{headers['x-typesafe-request-id']} {ID} {SPAN}\n" in running.stderr


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_reason_of_a_failed_start(form: str) -> None:
    script = f"import logs; logs.set_up('info', {form!r}); logs.last_words('no port', {form!r})"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    if form == "text":
        assert ended.stderr == "blink: no port\n"
    else:
        line = json.loads(ended.stderr)
        assert (line["level"], line["message"]) == ("critical", "no port")
