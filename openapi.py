"""The description of the API at `GET /openapi.json`, made from the models of `wire`."""

from functools import cache
from importlib import metadata
from typing import Any

from pydantic.json_schema import models_json_schema

import wire

_REF = "#/components/schemas/"
_WORDS = {
    400: "The body is not a JSON object, or the HTTP framing is unclear",
    401: "No key, or a wrong one",
    408: "The body came too slowly",
    413: "The body is too large",
    415: "The body's encoding is unknown",
    422: "A field is wrong or a limit is exceeded; all violations are listed, up to a number",
    431: "The head is too large",
    500: "A fault of the server; its log has the details under the request id",
    503: "Busy, loading or draining: try again",
    504: "The decision took too long",
}
_VIOLATIONS = (400, 422)
_SENT_BACK = {"x-typesafe-request-id": "Names the request in the server's log"}
_FURTHER = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "Seconds to wait"}}


def _ref(model: str) -> dict[str, str]:
    return {"$ref": _REF + model}


def _headers(names: dict[str, str]) -> dict[str, Any]:
    return {
        name: {"description": words, "schema": {"type": "string"}, "required": True} for name, words in names.items()
    }


def _response(words: str, schema: dict[str, Any], kind: str = "application/json", **headers: str) -> dict[str, Any]:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return {"description": words, "headers": _headers(_SENT_BACK | named), "content": {kind: {"schema": schema}}}


def _errors(*statuses: int) -> dict[str, Any]:
    return {
        str(status): _response(
            _WORDS[status],
            _ref("ViolationsError" if status in _VIOLATIONS else "RefusalError"),
            **_FURTHER.get(status, {}),
        )
        for status in statuses
    }


def _get(summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": responses}}


@cache
def document(*, keyed: bool, page: bool) -> dict[str, Any]:
    """The description of a server: with or without keys, with or without the page."""
    _, schemas = models_json_schema(
        [
            (wire.DecisionRequest, "validation"),
            (wire.DecisionResponse, "serialization"),
            (wire.ModelList, "serialization"),
            (wire.ViolationsError, "serialization"),
            (wire.RefusalError, "serialization"),
        ],
        ref_template=_REF + "{model}",
    )
    refused = (401,) if keyed else ()
    decide = {
        "summary": "Answer typed questions about a state",
        "operationId": "systemone",
        "parameters": [
            {
                "name": "traceparent",
                "in": "header",
                "description": "W3C trace context; its ids stand in the log. An invalid one is ignored.",
                "schema": {"type": "string"},
            }
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref("DecisionRequest")}}},
        "responses": {
            "200": _response(
                "One answer for each question", _ref("DecisionResponse"), Server_Timing="Milliseconds by stage"
            ),
            **_errors(400, *refused, 408, 413, 415, 422, 431, 500, 503, 504),
        },
    }
    listed = {"200": _response("The model", _ref("ModelList")), **_errors(*refused)}
    health = {"type": "object", "required": ["ok", "status", "model"], "properties": {"ok": {"type": "boolean"}}}
    described = {
        "/v1/systemone": {"post": decide},
        "/v1/models": _get("What is served", listed),
        "/healthz": _get(
            "How the server fares",
            {
                "200": _response("It decides", health),
                "503": _response("It does not: loading, draining or failed", health, Retry_After="Seconds to wait"),
            },
        ),
        "/metrics": _get("Figures for Prometheus", {"200": _response("Figures", {"type": "string"}, "text/plain")}),
        "/openapi.json": _get("This description", {"200": _response("OpenAPI 3.1", {"type": "object"})}),
    }
    if page:
        described["/"] = _get("A page to try it", {"200": _response("HTML", {"type": "string"}, "text/html")})
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in ("/v1/systemone", "/v1/models"):
            for operation in described[path].values():
                operation["security"] = [{"key": []}]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "blink",
            "version": _version(),
            "description": "Typed questions about a state, answered with probabilities.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": described,
        "components": components,
    }


def _version() -> str:
    try:
        return metadata.version("blink-server")
    except metadata.PackageNotFoundError:
        return "unknown"
