"""blink on a Ray cluster: fronts that speak HTTP, and replicas of the engine on whichever machines have room.

    serve run deploy/ray.yaml

Wire, prompts, queue and engine are those of `serve.py`. A decision changes nothing, so a front gives a request whose
replica died, or is full, to another one.
"""

import argparse
import asyncio
import shlex
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray.exceptions
import ray.serve as rayserve
import ray.serve.exceptions
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import openapi
import serve
import wire
from service import Service, health_reply
from transport import (
    Reply,
    content_coding,
    decode,
    error_reply,
    failed_reply,
    find_route,
    json_reply,
    log_fault,
    new_request_id,
    too_large,
)

_ROUTES: Mapping[str, Mapping[str, str]] = {
    "/v1/systemone": {"POST": "decide"},
    "/v1/models": {"GET": "models"},
    "/healthz": {"GET": "health"},
    "/health": {"GET": "health"},
    "/openapi.json": {"GET": "describe"},
}
_HEALTH_S = 2.0
_TRIES = 3
_LOST = (ray.exceptions.RayActorError, ray.serve.exceptions.ReplicaUnavailableError)


class Settings(BaseModel):
    """The arguments of the application."""

    model_config = ConfigDict(extra="forbid")

    flags: str = Field(default="", description="flags of serve.py: model, grouping, limits, keys, logs")
    replicas: int = Field(default=2, ge=1)
    fronts: int = Field(default=2, ge=1)
    gpus: float = Field(default=1, ge=0, description="of a replica")
    cpus: float = Field(default=2, ge=0, description="of a replica")


class Decider:
    """A replica: the model, its queue and the one thread that owns the device."""

    def __init__(self, flags: str) -> None:
        args = _parse(flags)
        self._service = serve.new_service(args, serve.mode(args))
        self._threads = ThreadPoolExecutor(args.max_connections)
        serve.load(self._service, args, on_death=lambda: None)  # seen by check_health

    async def decide(self, body: bytes, request_id: str) -> Reply:
        left = threading.Event()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._decide, body, request_id, left)
        finally:
            left.set()  # if this was cancelled, the client left

    async def health(self) -> dict[str, Any]:
        return self._service.health()

    def check_health(self) -> None:
        """Called by Ray, which starts another replica in place of one that raises."""
        if not self._service.worker_alive():
            raise RuntimeError("the decision worker died or hangs")

    def _decide(self, body: bytes, request_id: str, left: threading.Event) -> Reply:
        failure: Exception
        try:
            return self._service.decide(body, time.monotonic(), left.is_set)
        except wire.BlinkError as error:
            if error.status != 500:
                return error_reply(error)
            failure = error
        except Exception as error:
            failure = error
        log_fault(f"request {request_id} failed", failure, request_id=request_id)
        return failed_reply(request_id)


class Front:
    """HTTP: routes, keys, bodies and errors as `serve.py` has them; decides nothing."""

    def __init__(self, flags: str, deciders: Any) -> None:
        args = _parse(flags)
        self._service: Service = serve.new_service(args, "front")
        self._deciders = deciders

    async def __call__(self, request: Request) -> Response:
        request_id = new_request_id()
        try:
            target = f"{request.url.path}?{request.url.query}"
            answer = getattr(self, find_route(_ROUTES, target, request.method))
            reply = await answer(request, request_id)
        except wire.BlinkError as error:
            reply = error_reply(error)
        except Exception as error:
            log_fault(f"request {request_id} failed", error, request_id=request_id)
            reply = failed_reply(request_id)
        headers = {**reply.headers, "x-typesafe-request-id": request_id}
        return Response(reply.body, reply.status, headers, reply.content_type)

    async def decide(self, request: Request, request_id: str) -> Reply:
        self._service.authenticate(request.headers.get("Authorization"))
        if request.headers.get("Content-Type", "").lower().startswith("multipart/"):
            raise wire.violation("text_only", ["body"], wire.TEXT_ONLY)
        body = await _read_body(request, self._service.max_body_bytes)
        try:
            async with asyncio.timeout(self._service.request_timeout_s):
                return await self._ask(body, request_id)
        except TimeoutError:
            raise wire.refusal(504, "timeout", "the decision was not done in time") from None

    async def models(self, request: Request, request_id: str) -> Reply:
        self._service.authenticate(request.headers.get("Authorization"))
        return self._service.models()

    async def health(self, request: Request, request_id: str) -> Reply:
        try:
            async with asyncio.timeout(_HEALTH_S):
                return health_reply(await self._deciders.health.remote())
        except (TimeoutError, *_LOST):
            return health_reply(self._service.health())  # of a server that is loading

    async def describe(self, request: Request, request_id: str) -> Reply:
        return json_reply(200, openapi.document(keyed=bool(self._service.keys), page=False))

    async def _ask(self, body: bytes, request_id: str) -> Reply:
        reply = error_reply(wire.busy("no replica answers, try again"))
        for _ in range(_TRIES):
            try:
                reply = await self._deciders.decide.remote(body, request_id)
            except _LOST:
                continue
            except ray.serve.exceptions.BackPressureError:
                raise wire.busy("the queue is full") from None
            if reply.status != 503:
                break
        return reply


def app(settings: Settings) -> Any:
    """The application, for `import_path: deploy.ray_app:app`."""
    args = _parse(settings.flags)
    decider = rayserve.deployment(Decider).options(
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        # The replica's own queue says 503 long before; beyond this many Ray does.
        max_ongoing_requests=args.max_connections,
        max_queued_requests=args.max_connections,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=serve.DRAIN_S,
    )
    front = rayserve.deployment(Front).options(
        num_replicas=settings.fronts,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=args.max_connections,
        graceful_shutdown_timeout_s=serve.DRAIN_S,
    )
    return front.bind(settings.flags, decider.bind(settings.flags))


def _parse(flags: str) -> argparse.Namespace:
    try:
        return serve.parse_args(shlex.split(flags))
    except SystemExit:  # the reason is on stderr already, in one line
        raise ValueError(f"these flags are not valid for serve.py: {flags}") from None


async def _read_body(request: Request, limit: int) -> bytes:
    """The plain body.

    Raises:
        BlinkError: 400 if it ends early or does not decode, 413, 415.
    """
    coding = content_coding(request.headers.get("Content-Encoding"))
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise too_large(limit)
    except ClientDisconnect:
        raise wire.refusal(499, "client_closed_request", "the client left") from None
    return decode(bytes(body), coding, limit)
