"""What every server shares: its state, its health, its metrics and its routes, whatever engine decides."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from typing import Any, ClassVar, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

import openapi
import wire
from keys import Keys
from page import Page
from transport import Handler, Reply, json_reply

log = logging.getLogger("blink")

_LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 180)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STAGE_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30, 180)


@cache
def versions() -> dict[str, str | None]:
    """Installed versions of what computes the answers, without importing it."""

    def version(distribution: str) -> str | None:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    return {
        "torch": version("torch"),
        "transformers": version("transformers"),
        "fla": version("flash-linear-attention"),
    }


class Metrics:
    """What `/metrics` shows."""

    def __init__(self, queued: Callable[[], int], max_queued: Callable[[], int], ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "blink_requests", "Responses by path and status", ["path", "status"], registry=self.registry
        )
        self.refused = self.requests.labels("refused", "503")
        self.latency = Histogram(
            "blink_request_seconds",
            "First byte of a decision request to the end of its response",
            registry=self.registry,
            buckets=_LATENCY_BUCKETS,
        )
        self.stages = Histogram(
            "blink_stage_seconds",
            "Stages of a decision",
            ["stage"],
            registry=self.registry,
            buckets=_STAGE_BUCKETS,
        )
        self.batch_requests = Histogram(
            "blink_batch_requests",
            "Requests decided together",
            registry=self.registry,
            buckets=(1, 2, 4, 8, 16, 32, 64),
        )
        self.batch_seconds = Histogram(
            "blink_batch_seconds", "Time of a batch on the device", registry=self.registry, buckets=_STAGE_BUCKETS
        )
        self.batch_tokens = Counter("blink_batch_tokens", "Tokens read by the model", registry=self.registry)
        self.input_tokens = Counter(
            "blink_input_tokens", "Tokens of whole prompts, as in usage", registry=self.registry
        )
        self.questions = Counter("blink_questions", "Questions answered", registry=self.registry)
        Gauge("blink_queued_requests", "Requests that wait", registry=self.registry).set_function(queued)
        Gauge(
            "blink_max_queued_requests", "Requests that may wait; one more is refused", registry=self.registry
        ).set_function(max_queued)
        Gauge("blink_ready", "1 when requests are decided, else 0", registry=self.registry).set_function(ready)

    def watch_memory(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Show what `read` tells: bytes of device memory by kind. Nothing on a CPU."""
        if kinds := read():
            help_text = "Device memory: reserved now, the most ever in use"
            gauge = Gauge("blink_device_memory_bytes", help_text, ["kind"], registry=self.registry)
            for kind in kinds:

                def size(kind: str = kind) -> float:
                    return read()[kind]

                gauge.labels(kind).set_function(size)

    def on_batch(self, requests: int, tokens: int, seconds: float) -> None:
        self.batch_requests.observe(requests)
        self.batch_seconds.observe(seconds)
        self.batch_tokens.inc(tokens)


class Decider(Protocol):
    """Decides checked requests from many threads: a `blink.Batcher`, or another engine's front."""

    def decide(
        self, request: wire.DecisionRequest, *, timeout_s: float = ..., client_left: Callable[[], bool] = ...
    ) -> Any: ...

    def alive(self) -> bool: ...

    def queued(self) -> int: ...

    def close(self, timeout_s: float = ...) -> bool: ...


@dataclass(slots=True)
class Service:
    """The state that the handler threads share: what is served and how it fares."""

    name: str
    keys: Keys
    max_body_bytes: int
    max_connections: int
    request_timeout_s: float
    access_log: bool = False
    mode: str = ""
    page: Page | None = None
    status: str = "loading"
    progress: float = 0.0
    decider: Decider | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    batching: dict[str, Any] | None = None
    max_queued: int = 0
    started: float = field(default_factory=time.monotonic)
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.queued, lambda: self.max_queued, self.ready)

    def queued(self) -> int:
        return self.decider.queued() if self.decider else 0

    def worker_alive(self) -> bool:
        return self.decider is not None and self.decider.alive()

    def ready(self) -> bool:
        return self.status == "ok" and self.worker_alive()

    def ready_decider(self) -> Decider:
        """What decides requests.

        Raises:
            BlinkError: 503 while there is nothing that does.
        """
        if self.status != "ok" or self.decider is None or not self.decider.alive():
            status = "failed" if self.status == "ok" else self.status
            raise wire.busy(f"the server is {status}, try again")
        return self.decider

    def authenticate(self, authorization: str | None) -> None:
        """Check an Authorization header, whose bytes were read as Latin-1.

        Raises:
            BlinkError: 401 if keys are asked for and this is none.
        """
        if not self.keys:
            return
        scheme, _, given = (authorization or "").partition(" ")
        known = given.strip().encode("latin-1") in self.keys
        if scheme.lower() != "bearer" or not known:
            raise wire.refusal(
                401,
                "authentication_error",
                "this server asks for its API key as a Bearer token",
                WWW_Authenticate="Bearer",
            )

    def decide(self, body: bytes, began: float, client_left: Callable[[], bool]) -> Reply:
        """The answer to a decision request whose first byte came at `began`, a time of the monotonic clock.

        Raises:
            BlinkError: it is refused or fails.
        """
        decider = self.ready_decider()
        read = time.monotonic()
        request = wire.read(body)
        parsed = time.monotonic()
        decision = decider.decide(request, timeout_s=began + self.request_timeout_s - parsed, client_left=client_left)
        response = wire.DecisionResponse(
            model=self.name, answers=decision.answers, usage=wire.Usage(input_tokens=decision.input_tokens)
        )
        payload = response.model_dump_json().encode("utf-8")
        stages = {"read": read - began, "parse": parsed - read, **decision.seconds}
        for stage, seconds in stages.items():
            self.metrics.stages.labels(stage).observe(seconds)
        self.metrics.input_tokens.inc(decision.input_tokens)
        self.metrics.questions.inc(len(decision.answers))
        stages["total"] = time.monotonic() - began
        timing = ", ".join(f"{stage};dur={seconds * 1e3:.2f}" for stage, seconds in stages.items())
        return Reply(200, payload, {"Server-Timing": timing})

    def models(self) -> Reply:
        card = wire.ModelCard(name=self.name, description="Typed decisions over text", release_date="")
        return Reply(200, wire.ModelList(models=[card]).model_dump_json().encode("utf-8"))

    def health(self) -> dict[str, Any]:
        """The facts of `/healthz`; reads host memory only."""
        status = self.status  # it may change meanwhile
        ok = status == "ok" and self.worker_alive()
        counts = {"worker_alive": self.worker_alive(), "queued": self.queued()}
        health = {
            "ok": ok,
            "status": "failed" if status == "ok" and not ok else status,
            "model": self.name,
            "revision": None,
            "weights_verified": None,
            "hub_offline": None,
            "warmup": None,
            "kernels": None,
            "versions": versions(),
            "batching": self.batching and self.batching | counts,
            "device": None,
            "dtype": None,
            "engine": None,
            "limits": asdict(wire.LIMITS)
            | {"max_body_bytes": self.max_body_bytes, "max_connections": self.max_connections},
            "queue": {"max_queued": self.max_queued} | counts,
            "api_key_required": len(self.keys) > 0,
            "accepts_images": False,
            "uptime_s": round(time.monotonic() - self.started, 1),
        }
        if status == "loading":
            health["progress"] = round(self.progress, 3)
        limits = health["limits"] | self.facts.get("limits", {})
        return health | self.facts | {"limits": limits}


def health_reply(health: Mapping[str, Any]) -> Reply:
    return json_reply(200 if health["ok"] else 503, health, {} if health["ok"] else {"Retry-After": "1"})


class DecisionHandler(Handler):
    """The routes. `handler_for` binds it to a `Service`."""

    service: ClassVar[Service]
    routes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "/v1/systemone": {"POST": "post_systemone"},
        "/v1/models": {"GET": "get_models"},
        "/healthz": {"GET": "get_health"},
        "/health": {"GET": "get_health"},
        "/metrics": {"GET": "get_metrics"},
        "/openapi.json": {"GET": "get_openapi"},
    }

    def post_systemone(self) -> Reply:
        service = self.service
        service.authenticate(self.headers.get("Authorization"))
        service.ready_decider()
        if self.headers.get_content_maintype() == "multipart":
            raise wire.violation("text_only", ["body"], wire.TEXT_ONLY)
        body = self.read_body(service.max_body_bytes)
        return service.decide(body, self.began, self.client_left)

    def get_models(self) -> Reply:
        self.service.authenticate(self.headers.get("Authorization"))
        return self.service.models()

    def get_health(self) -> Reply:
        return health_reply(self.service.health())

    def get_page(self) -> Reply:
        page = self.service.page
        assert page is not None  # else there is no route to it
        return Reply(200, page.body, page.headers, "text/html; charset=utf-8")

    def get_metrics(self) -> Reply:
        return Reply(200, generate_latest(self.service.metrics.registry), content_type=CONTENT_TYPE_LATEST)

    def get_openapi(self) -> Reply:
        return json_reply(200, openapi.document(keyed=bool(self.service.keys), page=self.service.page is not None))

    def on_reply(self, status: int) -> None:
        path = self.path.split("?")[0].rstrip("/") or "/" if self.command else ""
        known = path if path in self.routes else "other"
        self.service.metrics.requests.labels(known, str(status)).inc()
        seconds = time.monotonic() - self.began
        if known == "/v1/systemone":
            self.service.metrics.latency.observe(seconds)
        if self.service.access_log:
            self._log_access(known, status, seconds)

    @classmethod
    def on_refusal(cls) -> None:
        cls.service.metrics.refused.inc()

    def _log_access(self, path: str, status: int, seconds: float) -> None:
        method = self.command if self.command in _METHODS else "-"  # any other word is the client's own text
        identity = self.identity()
        fields = {"method": method, "path": path, "status": status, "duration_ms": round(seconds * 1e3, 3), **identity}
        words = " ".join(identity.values())
        log.info("%s %s %s %.1f ms %s", method, path, status, seconds * 1e3, words, extra={"fields": fields})


def handler_for(service: Service) -> type[DecisionHandler]:
    """The handler class of a server."""
    page = {"/": {"GET": "get_page"}} if service.page else {}
    return type("BoundHandler", (DecisionHandler,), {"service": service, "routes": {**DecisionHandler.routes, **page}})
