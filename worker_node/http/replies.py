"""Replies in JSON, and their descriptions for /openapi.json, which tests compare with them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict


def json_response(data: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A reply with `data` as JSON."""
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
