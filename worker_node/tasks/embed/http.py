"""The routes of embeddings in every dialect: native, OpenAI and Ollama."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import orjson
from aiohttp import web
from pydantic import Field

from worker_node.core.errors import BadRequest, UnsupportedParameter
from worker_node.core.types import ModelKind
from worker_node.http.body import Body, DialectBody, OneOrMany, Table, Unsupported, note_effects, read_body
from worker_node.http.context import NODE, STATE, busy_fields, request_context, route_headers, timing_ms
from worker_node.http.replies import OpenAIUsage, Reply
from worker_node.http.routes import BINARY, JSON, ApiOperation, TaskApi
from worker_node.node import Node
from worker_node.tasks.embed.service import (
    INPUT_TYPES,
    EmbeddingMetrics,
    EmbeddingModel,
    EmbeddingReply,
    Vectors,
    embed,
)
from worker_node.tasks.generate.http.ollama import OllamaOptions, keeping, served
from worker_node.tasks.generate.http.parameters import KeepAlive


def _headers(reply: EmbeddingReply) -> dict[str, str]:
    """The headers of every embedding reply: its route and cost, its vector space, and whether the cache had it."""
    headers = route_headers(reply.route, reply.busy)
    headers["X-Space"] = reply.space
    if reply.cached is not None:
        headers["X-NPU-Node-Cache"] = reply.cached
    return headers


def _check_count(node: Node, count: int, param: str) -> None:
    if count > (most := node.settings.max_texts):
        raise BadRequest(f"{count} texts in one request; at most {most} are taken", param=param)


# Rendering this many numbers as JSON takes about a millisecond; between chunks other requests get their turn.
_NUMBERS_PER_CHUNK = 32_768


async def render_vectors(
    node: Node,
    head: dict[str, Any],
    name: str,
    reply: EmbeddingReply,
    item: Callable[[int, Vectors], object] = lambda _index, vector: vector,
) -> web.Response:
    """The reply with `head` and, by that name, the list of what `item` makes of each vector and its index."""
    count, dimensions = reply.vectors.shape
    step = max(1, _NUMBERS_PER_CHUNK // max(1, dimensions))
    parts = []

    def render(start: int) -> None:
        items = [item(index, row) for index, row in enumerate(reply.vectors[start : start + step], start)]
        parts.append(orjson.dumps(items, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1])

    if count > step:
        async with node.state.rendering:
            for start in range(0, count, step):
                render(start)
                await asyncio.sleep(0)
    elif count:
        render(0)
    body = b'%s,"%s":[%s]}' % (orjson.dumps(head)[:-1], name.encode(), b",".join(parts))
    return web.Response(body=body, content_type="application/json", charset="utf-8", headers=_headers(reply))


class EmbeddingsBody(Body):
    """Body of POST /embeddings."""

    texts: Annotated[list[str], OneOrMany]
    model: str | None = None
    truncate: bool = False
    input_type: Annotated[str, Field(max_length=64)] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


async def _embeddings(request: web.Request) -> web.StreamResponse:
    node = request.app[NODE]
    context = request_context(request)
    body = await read_body(request, EmbeddingsBody)
    _check_count(node, len(body.texts), "texts")
    reply = await embed(
        node.services,
        context,
        body.texts,
        body.model,
        truncate=body.truncate,
        input_type=body.input_type,
        dimensions=body.dimensions,
    )
    if "application/octet-stream" in request.headers.get("Accept", ""):
        count, dimensions = reply.vectors.shape
        return web.Response(
            body=reply.vectors.astype("<f4", copy=False).tobytes(),
            content_type="application/octet-stream",
            headers=_headers(reply) | {"X-Shape": f"{count},{dimensions}"},
        )

    head: dict[str, Any] = {
        "model": reply.route.model,
        "device": reply.route.device,
        "dimensions": reply.vectors.shape[1],
        "space": reply.space,
        "usage": {"prompt_tokens": reply.usage.prompt_tokens},
        "timing_ms": timing_ms(reply.timing, "queue", "tokenize", "inference", "total"),
        **busy_fields(reply.busy, whole=True),
    }
    if reply.route.emulated:
        head["emulated"] = True
    return await render_vectors(node, head, "embeddings", reply)


Ids = Annotated[list[int], Field(min_length=1)]
# OpenAI refuses an empty one.
Text = Annotated[str, Field(min_length=1)]

EMBEDDINGS: Table = {
    "add_special_tokens": Unsupported("send token ids for a text without special tokens", (True,)),
    "messages": Unsupported("send the text as input"),
}


class OpenAIEmbeddingsBody(DialectBody):
    """Body of POST /v1/embeddings. Token ids are those of the model's own tokenizer, special tokens included."""

    rules: ClassVar[Table] = EMBEDDINGS

    model: str
    input: Text | Annotated[list[Text], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool | Literal["NONE", "END"] | None = None
    truncate_prompt_tokens: Literal[-1] | None = None
    normalize: bool | None = None
    input_type: str | None = None

    def texts(self) -> tuple[str | tuple[int, ...], ...]:
        """The texts; a single one may come without a list around it."""
        if isinstance(self.input, str):
            return (self.input,)
        texts: list[str | tuple[int, ...]] = []
        ids: list[int] = []
        for item in self.input:
            if isinstance(item, int):
                ids.append(item)
            else:
                texts.append(item if isinstance(item, str) else tuple(item))
        return (tuple(ids),) if ids else tuple(texts)


async def _openai_embeddings(request: web.Request) -> web.Response:
    node = request[STATE].node
    context = request_context(request)
    body = await read_body(request, OpenAIEmbeddingsBody)
    texts = body.texts()
    _check_count(node, len(texts), "input")
    model = await node.manager.model_of(ModelKind.EMBEDDING, EmbeddingModel, body.model, context.deadline)
    if body.normalize is False:
        raise UnsupportedParameter(
            f"normalize: the vectors of {model.id} are as it was trained to give them; leave it out", param="normalize"
        )
    reply = await embed(
        node.services,
        context,
        texts,
        body.model,
        truncate=body.truncate in (True, "END") or body.truncate_prompt_tokens is not None,
        input_type=_input_type(request, body.input_type, model),
        dimensions=body.dimensions,
    )
    usage = {"prompt_tokens": reply.usage.prompt_tokens, "total_tokens": reply.usage.prompt_tokens}
    head = {"object": "list", "model": reply.route.model, "usage": usage}

    def item(index: int, vector: Vectors) -> dict[str, Any]:
        shown: object = vector
        if body.encoding_format == "base64":
            # Of little-endian float32.
            shown = base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
        return {"object": "embedding", "index": index, "embedding": shown}

    return await render_vectors(node, head, "data", reply, item)


def _input_type(request: web.Request, given: str | None, model: EmbeddingModel) -> str | None:
    """The input type, or None where it has no effect: the model has no prompts, or it is for another use than search.

    The reply then lists it as ignored; a node that is set to refuse such fields leaves it for the error.
    """
    useless = given is not None and (not model.installed.prompts or given not in INPUT_TYPES)
    if not useless or request[STATE].node.settings.unknown_fields == "reject":
        return given
    note_effects(request, ["input_type"])
    return None


class OllamaBody(DialectBody):
    """What both of Ollama's requests have."""

    model: str
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class EmbedBody(OllamaBody):
    """Body of POST /api/embed. A text that is too long is cut unless `truncate` is false.

    As with Ollama, `""` alone is no text, and only loads the model.
    """

    input: str | list[str]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0)] | None = None


class OllamaEmbeddingsBody(OllamaBody):
    """Body of POST /api/embeddings. As with Ollama, an empty prompt only loads the model."""

    prompt: str


async def _embed(request: web.Request) -> web.Response:
    body = await read_body(request, EmbedBody)
    texts = body.input if isinstance(body.input, list) else [body.input] if body.input else []
    reply = await _run(request, body, texts, truncate=body.truncate is not False, dimensions=body.dimensions)
    head = {
        "model": body.model,
        "total_duration": round(reply.timing.total * 1e6),
        "load_duration": round(reply.loading_s * 1e9),
        "prompt_eval_count": reply.usage.prompt_tokens,
    }
    return await render_vectors(request.app[NODE], head, "embeddings", reply)


async def _ollama_embeddings(request: web.Request) -> web.Response:
    body = await read_body(request, OllamaEmbeddingsBody)
    reply = await _run(request, body, [body.prompt] if body.prompt else [], truncate=True)
    content = orjson.dumps({"embedding": reply.vectors.ravel()}, option=orjson.OPT_SERIALIZE_NUMPY)
    return web.Response(body=content, content_type="application/json", charset="utf-8", headers=_headers(reply))


async def _run(
    request: web.Request, body: OllamaBody, texts: list[str], *, truncate: bool, dimensions: int | None = None
) -> EmbeddingReply:
    node, context = request.app[NODE], request_context(request)
    _check_count(node, len(texts), "input")
    model = await served(request, body.model)
    async with keeping(request, model, body.keep_alive):
        return await embed(node.services, context, texts, model.id, truncate=truncate, dimensions=dimensions or None)


# The forms of replies with vectors, as /openapi.json describes them.


class Embeddings(Reply):
    """POST /embeddings."""

    model: str
    device: str
    dimensions: int
    space: str
    embeddings: list[list[float]]
    usage: dict[str, int]
    timing_ms: dict[str, float | None]
    npu_busy_delta_us: int | None
    joules: float | None


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


_route = partial(ApiOperation, "post", inference=True)

API = TaskApi(
    operations=(
        _route("/embeddings", _embeddings, "Embed texts", {JSON: Embeddings, BINARY: None}, EmbeddingsBody),
        _route("/v1/embeddings", _openai_embeddings, "OpenAI: embed", {JSON: OpenAIEmbeddings}, OpenAIEmbeddingsBody),
        _route("/api/embed", _embed, "Ollama: embed", {JSON: OllamaEmbed}, EmbedBody),
        _route(
            "/api/embeddings",
            _ollama_embeddings,
            "Ollama: embed one text",
            {JSON: OllamaEmbedding},
            OllamaEmbeddingsBody,
        ),
    ),
    metrics=EmbeddingMetrics,
)
