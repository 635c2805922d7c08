"""The forms of replies with generated text, and of tokens, as /openapi.json tells them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from worker_node.http.replies import OpenAIUsage, Reply


class Inference(Reply):
    """POST /inference."""

    model: str
    device: str
    text: str
    finish_reason: Literal["stop", "length"]
    usage: dict[str, int]
    timing_ms: dict[str, float | None]
    npu_busy_delta_us: int | None


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


class OllamaFrame(Reply):
    """A frame of /api/generate or /api/chat, and its whole reply without a stream."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = Field(default=None)
