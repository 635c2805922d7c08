"""The forms of replies with vectors, as /openapi.json tells them."""

from __future__ import annotations

from typing import Literal

from worker_node.api.replies import OpenAIUsage, Reply


class NativeUsage(Reply):
    """Tokens in."""

    prompt_tokens: int


class Embeddings(Reply):
    """POST /embeddings."""

    model: str
    device: str
    dimensions: int
    space: str
    embeddings: list[list[float]]
    usage: NativeUsage
    timing_ms: dict[str, float | None]
    npu_busy_delta_us: int | None


class OpenAIEmbedding(Reply):
    """One vector, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class OpenAIEmbeddings(Reply):
    """POST /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[OpenAIEmbedding]
    usage: OpenAIUsage


class OllamaEmbed(Reply):
    """POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Reply):
    """POST /api/embeddings."""

    embedding: list[float]
