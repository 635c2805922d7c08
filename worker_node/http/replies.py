"""Replies in JSON, and their descriptions for /openapi.json, which tests compare with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict

from worker_node.core.errors import ContextLengthExceeded, NodeError, Overloaded


def json_response(data: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(data), status=status, content_type="application/json", charset="utf-8", headers=headers
    )


def utc(time: float) -> str:
    """A time in seconds since the epoch, as RFC 3339 in UTC."""
    return datetime.fromtimestamp(time, UTC).isoformat().replace("+00:00", "Z")


class Reply(BaseModel):
    """A reply: fields may be added, none is taken away."""

    # Only /openapi.json needs their schemas: a node that starts need not wait for them.
    model_config = ConfigDict(extra="allow", defer_build=True)


class ErrorFields(Reply):
    message: str
    type: str
    code: str | None
    param: str | None


class Error(Reply):
    """An error of the native and the OpenAI dialect."""

    error: ErrorFields


class AnthropicError(Reply):
    """An error of the Anthropic dialect."""

    type: Literal["error"]
    error: ErrorFields


class OllamaError(Reply):
    """An error of the Ollama dialect."""

    error: str
    code: str


class Health(Reply):
    """GET /health. Where the node has keys, a caller without one gets only `status` and `version`.

    `faults` are the faults on demand that it was started with. Each of a model's `engines` has what its passport says,
    `certified` (certified, limited, failed, expired or not certified), `certified_reason`, and `certified_limit` in
    tokens of a prompt; `excluded` are the devices that the model may not run on, and why.
    """

    status: Literal["ready", "degraded", "starting", "draining", "failed"]
    reason: str | None = None
    version: str
    uptime_s: float | None = None
    faults: list[str] | None = None
    devices: list[dict[str, Any]] | None = None
    models: list[dict[str, Any]] | None = None
    npu: dict[str, Any] | None = None


class Status(Reply):
    status: str


class Devices(Reply):
    """GET /health/devices. Each property and counter has a `value`, or null with a `reason`."""

    openvino: str | None
    error: str | None
    devices: list[dict[str, Any]]
    npu_counters: dict[str, Any]


class OpenAIModel(Reply):
    """One model. `devices` are its placements, with what their passports say, as in GET /models."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    capabilities: list[str]
    devices: list[dict[str, Any]]


class OpenAIModels(Reply):
    object: Literal["list"]
    data: list[OpenAIModel]


class OpenAIUsage(Reply):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, int] | None = None


# Errors as replies: in the native form, OpenAI's, Anthropic's and Ollama's. A request may fail before it reaches a
# handler, so the form follows from its path and headers (`renderer`).

Renderer = Callable[[NodeError], web.Response]


def describe(error: NodeError) -> dict[str, str | None]:
    return {"message": error.message, "type": error.type, "code": error.code, "param": error.param}


def retry_headers(error: NodeError) -> dict[str, str]:
    """`Retry-After` (whole seconds, rounded up) and `retry-after-ms`, where another try may help."""
    if error.retry_after is None:
        return {}
    return {
        "Retry-After": str(max(1, math.ceil(error.retry_after))),
        "retry-after-ms": str(max(1, round(error.retry_after * 1000))),
    }


def error_response(error: NodeError) -> web.Response:
    return json_response({"error": describe(error)}, error.status, retry_headers(error))


# OpenAI's words for codes of this node.
_CODES = {"overloaded": "rate_limit_exceeded"}


def describe_error(error: NodeError) -> dict[str, str | None]:
    """The four fields of an error, with the code that OpenAI has for it."""
    fields = describe(error)
    return fields | {"code": _CODES.get(error.code, error.code)}


def openai_error_response(error: NodeError) -> web.Response:
    return _sdk_response(error, {"error": describe_error(error)}, error.status)


def _sdk_response(error: NodeError, body: object, status: int) -> web.Response:
    """`x-should-retry` keeps OpenAI's and Anthropic's SDKs, which would retry every 408, 409, 429 and 5xx, from
    repeating what cannot succeed."""
    headers = {"x-should-retry": "true" if error.retry_after is not None else "false"}
    return json_response(body, status, retry_headers(error) | headers)


# Ollama's clients know a full queue by this text.
BUSY = "server busy, please try again. maximum pending requests exceeded"


def ollama_error(error: NodeError) -> dict[str, str]:
    """The body of an error. Ollama's clients read `error`; `code` is this node's own."""
    return {"error": BUSY if isinstance(error, Overloaded) else error.message, "code": error.code}


def ollama_error_response(error: NodeError) -> web.Response:
    """The reply to a request that failed. A full queue is 503 here."""
    status = 503 if isinstance(error, Overloaded) else error.status
    return json_response(ollama_error(error), status, retry_headers(error))


# Anthropic's types of errors by status. What is 503 here is 529 there.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: NodeError) -> dict[str, object]:
    """The body of an error: `code` and `param` are this node's own."""
    text = error.message
    if isinstance(error, ContextLengthExceeded) and error.tokens is not None:
        # Clients know by these words that they must shorten the prompt or send it elsewhere.
        text = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": text, "code": error.code, "param": error.param}}


def anthropic_error_response(error: NodeError) -> web.Response:
    return _sdk_response(error, anthropic_error(error), 529 if error.status == 503 else error.status)


OPENAI_PREFIX = "/v1/"
# OpenVINO Model Server has OpenAI's routes there.
OVMS_PREFIX = "/v3/"

# Sent by Anthropic's clients, whose path for models is OpenAI's too.
ANTHROPIC_VERSION = "anthropic-version"

_BY_PREFIX: tuple[tuple[str, Renderer], ...] = (
    (OPENAI_PREFIX + "messages", anthropic_error_response),
    (OVMS_PREFIX + "messages", anthropic_error_response),
    (OPENAI_PREFIX, openai_error_response),
    (OVMS_PREFIX, openai_error_response),
    ("/api/", ollama_error_response),
)


def renderer(request: web.BaseRequest) -> Renderer:
    """The function that makes a reply of an error of this request."""
    path = request.path
    if ANTHROPIC_VERSION in request.headers and path.startswith((OPENAI_PREFIX + "models", OVMS_PREFIX + "models")):
        return anthropic_error_response
    return next((render for prefix, render in _BY_PREFIX if path.startswith(prefix)), error_response)
