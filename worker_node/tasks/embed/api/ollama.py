"""POST /api/embed, and /api/embeddings as it was before."""

from __future__ import annotations

from typing import Annotated

import orjson
from aiohttp import web
from pydantic import Field

from worker_node.api.body import DialectBody, read_body
from worker_node.api.context import request_context
from worker_node.api.keep_alive import KeepAlive, keeping
from worker_node.api.keys import NODE
from worker_node.api.middleware import inference
from worker_node.api.ollama.frames import Loading
from worker_node.api.ollama.options import OllamaOptions
from worker_node.api.ollama.residents import served
from worker_node.core.errors import BadRequest
from worker_node.core.types import RequestContext
from worker_node.tasks.embed.api.headers import embedding_headers
from worker_node.tasks.embed.api.vectors import rows_json
from worker_node.tasks.embed.serving.requests import EmbeddingReply, EmbeddingRequest
from worker_node.tasks.embed.serving.service import embed


class EmbedBody(DialectBody):
    """Body of POST /api/embed. A text that is too long is cut unless `truncate` is false."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=0)] | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsBody(DialectBody):
    """Body of POST /api/embeddings."""

    model: str
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [web.post("/api/embed", inference(_embed)), web.post("/api/embeddings", inference(_embeddings))]


async def _embed(request: web.Request) -> web.Response:
    context = request_context(request)
    body = await read_body(request, EmbedBody)
    texts = (body.input,) if isinstance(body.input, str) else tuple(body.input)
    reply, loading = await _run(request, context, body, texts, truncate=body.truncate is not False)
    head = {
        "model": body.model,
        "total_duration": round(reply.timing.total * 1e6),
        "load_duration": loading.nanoseconds,
        "prompt_eval_count": reply.usage.prompt_tokens,
    }
    rows = await rows_json(reply.vectors)
    return _json(orjson.dumps(head)[:-1] + b',"embeddings":[' + rows + b"]}", reply)


async def _embeddings(request: web.Request) -> web.Response:
    context = request_context(request)
    body = await read_body(request, OllamaEmbeddingsBody)
    reply, _ = await _run(request, context, body, (body.prompt,), truncate=True)
    return _json(orjson.dumps({"embedding": reply.vectors[0]}, option=orjson.OPT_SERIALIZE_NUMPY), reply)


async def _run(
    request: web.Request,
    context: RequestContext,
    body: EmbedBody | OllamaEmbeddingsBody,
    texts: tuple[str, ...],
    *,
    truncate: bool,
) -> tuple[EmbeddingReply, Loading]:
    node = request.app[NODE]
    if len(texts) > node.settings.max_texts:
        raise BadRequest(
            f"{len(texts)} texts in one request; at most {node.settings.max_texts} are taken", param="input"
        )
    model = await served(request, body.model)
    wanted = (body.dimensions or None) if isinstance(body, EmbedBody) else None
    async with keeping(request, model, body.keep_alive):
        reply = await embed(
            node.services, EmbeddingRequest(context, texts, model.id, truncate=truncate, dimensions=wanted)
        )
    return reply, Loading(reply.loading_s)


def _json(body: bytes, reply: EmbeddingReply) -> web.Response:
    return web.Response(body=body, content_type="application/json", charset="utf-8", headers=embedding_headers(reply))
