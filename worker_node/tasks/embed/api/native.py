"""The native dialect: POST /embeddings."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from aiohttp import web
from pydantic import Field

from worker_node.api.body import Body, OneOrMany, read_body
from worker_node.api.context import request_context
from worker_node.api.keys import NODE
from worker_node.api.middleware import inference
from worker_node.api.timing import timing_ms
from worker_node.core.errors import BadRequest
from worker_node.tasks.embed.api.headers import embedding_headers
from worker_node.tasks.embed.api.vectors import rows_json
from worker_node.tasks.embed.serving.requests import EmbeddingReply, EmbeddingRequest
from worker_node.tasks.embed.serving.service import embed


class EmbeddingsBody(Body):
    """Body of POST /embeddings."""

    texts: Annotated[list[str], OneOrMany]
    model: str | None = None
    truncate: bool = False
    input_type: Annotated[str, Field(max_length=64)] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [web.post("/embeddings", inference(_embeddings))]


async def _embeddings(request: web.Request) -> web.StreamResponse:
    node = request.app[NODE]
    context = request_context(request)
    body = await read_body(request, EmbeddingsBody)
    if len(body.texts) > node.settings.max_texts:
        raise BadRequest(
            f"{len(body.texts)} texts in one request; at most {node.settings.max_texts} are taken",
            param="texts",
        )
    wanted = EmbeddingRequest(
        context,
        tuple(body.texts),
        body.model,
        truncate=body.truncate,
        input_type=body.input_type,
        dimensions=body.dimensions,
    )
    reply = await embed(node.services, wanted)
    headers = embedding_headers(reply)
    if "application/octet-stream" in request.headers.get("Accept", ""):
        count, dimensions = reply.vectors.shape
        return web.Response(
            body=reply.vectors.astype("<f4", copy=False).tobytes(),
            content_type="application/octet-stream",
            headers=headers | {"X-Shape": f"{count},{dimensions}"},
        )
    return web.Response(
        body=await _embeddings_json(reply), content_type="application/json", charset="utf-8", headers=headers
    )


async def _embeddings_json(reply: EmbeddingReply) -> bytes:
    """Render the reply in pieces, so that a large one does not hold up the event loop."""
    head: dict[str, Any] = {
        "model": reply.route.model,
        "device": reply.route.device,
        "dimensions": reply.vectors.shape[1],
        "space": reply.space,
        "usage": {"prompt_tokens": reply.usage.prompt_tokens},
        "timing_ms": timing_ms(reply.timing, "queue", "tokenize", "inference", "total"),
        "npu_busy_delta_us": reply.npu_busy_delta_us,
    }
    if reply.npu_busy_shared:
        head["npu_busy_exclusive"] = False
    if reply.route.emulated:
        head["emulated"] = True
    return orjson.dumps(head)[:-1] + b',"embeddings":[' + await rows_json(reply.vectors) + b"]}"
