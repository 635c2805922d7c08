"""The forms of replies, as /openapi.json tells them. Handlers render by hand, and tests hold them to these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Reply(BaseModel):
    """A reply: fields may be added, none is taken away."""

    # Only /openapi.json needs their schemas: a node that starts need not wait for them.
    model_config = ConfigDict(extra="allow", defer_build=True)


class ErrorFields(Reply):
    """What went wrong, and which part of the request did it."""

    message: str
    type: str
    code: str | None
    param: str | None


class Error(Reply):
    """An error of the native and the OpenAI dialect."""

    error: ErrorFields


class OllamaError(Reply):
    """An error of the Ollama dialect."""

    error: str


class Health(Reply):
    """GET /health. Where the node has keys, a caller without one gets only `status` and `version`."""

    status: Literal["ready", "degraded", "starting", "draining", "failed"]
    reason: str | None = None
    version: str
    uptime_s: float | None = None
    devices: list[dict[str, Any]] | None = None
    models: list[dict[str, Any]] | None = None
    npu: dict[str, Any] | None = None


class Status(Reply):
    """GET /health/live and /health/ready."""

    status: str


class Devices(Reply):
    """GET /health/devices."""

    openvino: str | None
    devices: list[dict[str, Any]]
    npu_counters: dict[str, Any]


class ExplanationReply(Reply):
    """POST /route/explain."""

    model: str
    token_count: int
    device: str | None
    reason: str | None
    placements: list[dict[str, Any]]


class Inference(Reply):
    """POST /inference."""

    model: str
    device: str
    text: str
    finish_reason: Literal["stop", "length"]
    usage: dict[str, int]
    timing_ms: dict[str, float | None]
    npu_busy_delta_us: int | None


class OpenAIModel(Reply):
    """One model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    capabilities: list[str]


class OpenAIModels(Reply):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[OpenAIModel]


class OpenAIUsage(Reply):
    """Tokens in and out."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Reply):
    """POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage


class TextChoice(Reply):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(Reply):
    """POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: OpenAIUsage


class OpenAIResponse(Reply):
    """POST /v1/responses, and GET of one that is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed", "cancelled"]
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class OpenAIDeleted(Reply):
    """DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: bool


class OpenAIItems(Reply):
    """GET /v1/responses/{id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Tokenized(Reply):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int] | list[dict[str, Any]]


class Detokenized(Reply):
    """POST /detokenize: the text, as vLLM and llama.cpp's server name it."""

    prompt: str
    content: str


class OllamaVersion(Reply):
    """GET /api/version."""

    version: str


class OllamaModels(Reply):
    """GET /api/tags and /api/ps."""

    models: list[dict[str, Any]]


class OllamaShow(Reply):
    """POST /api/show."""

    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaFrame(Reply):
    """A frame of /api/generate or /api/chat, and its whole reply without a stream."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = Field(default=None)


class OllamaStatus(Reply):
    """POST /api/pull."""

    status: str
