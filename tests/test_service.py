"""What every server shares: health, keys, metrics, logs."""

import json
import math
import urllib.error
import urllib.request
from http.client import HTTPConnection
from typing import Any

import pytest
from prometheus_client import generate_latest
from servers import KEY, RunningServer, StartServer, wait_until

import service
import wire
from keys import Keys

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


def test_versions_name_what_computes() -> None:
    assert list(service.versions()) == ["torch", "transformers", "fla"]
    assert str(service.versions()["transformers"]).startswith("5.")


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
    made = service.Service(
        name="m", keys=Keys("k"), max_body_bytes=1, max_connections=1, request_timeout_s=1, progress=0.25
    )
    loading = made.health()
    assert list(loading) == [*HEALTH_KEYS, "progress"]
    assert (loading["ok"], loading["status"], loading["progress"]) == (False, "loading", 0.25)
    assert loading["api_key_required"] is True
    for status in ("draining", "failed", "ok"):  # ok without a living worker is a failure
        made.status = status
        health = made.health()
        assert (health["ok"], health["status"]) == (False, "failed" if status == "ok" else status)
        with pytest.raises(wire.BlinkError) as caught:
            made.ready_decider()
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
        wait_until(lambda: "GET other 404" in running.stderr)  # a response is counted, then logged, after its last byte
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
    metrics, without = service.Metrics(int, int, bool), service.Metrics(int, int, bool)
    metrics.watch_memory(lambda: sizes)
    without.watch_memory(dict)
    sizes["reserved"] = 9
    assert metrics.registry.get_sample_value("blink_device_memory_bytes", {"kind": "reserved"}) == 9
    assert "device_memory" not in generate_latest(without.registry).decode()


def test_no_access_lines_by_default(server: RunningServer) -> None:
    post(server.url, ASKED)
    assert "/v1/systemone" not in server.stderr
    assert "secret" not in server.stderr
