"""POST /rerank, /v1/rerank and /v2/rerank."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from worker_node.api.body import read_body
from worker_node.api.context import request_context, route_headers
from worker_node.api.errors import describe, retry_headers
from worker_node.api.keys import NODE
from worker_node.api.middleware import inference
from worker_node.core.errors import NodeError
from worker_node.tasks.rerank.api.body import Document, RerankBody
from worker_node.tasks.rerank.serving.model import RerankReply, RerankRequest
from worker_node.tasks.rerank.serving.service import rerank

PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


def routes() -> list[web.RouteDef]:
    """The routes of this task."""
    return [web.post(path, inference(_rerank)) for path in PATHS]


def error_response(error: NodeError) -> web.Response:
    """An error as Cohere's clients (`message`) and the node's own (`error`) read it."""
    return web.Response(
        status=error.status,
        body=orjson.dumps({"message": error.message, "error": describe(error)}),
        content_type="application/json",
        charset="utf-8",
        headers=retry_headers(error),
    )


async def _rerank(request: web.Request) -> web.Response:
    context = request_context(request)
    body = await read_body(request, RerankBody)
    field, texts = body.given()
    wanted = RerankRequest(
        context,
        body.query,
        texts,
        body.model,
        truncate=body.cuts(),
        max_document_tokens=body.max_tokens_per_doc,
        field=field,
    )
    reply = await rerank(request.app[NODE].services, wanted)
    rendered: Any = _tei(body, texts, reply)
    if body.texts is None:
        rendered = _cohere(body, texts, reply, context.request_id, version="2" if request.path == "/v2/rerank" else "1")
    return web.Response(
        body=orjson.dumps(rendered),
        content_type="application/json",
        charset="utf-8",
        headers=route_headers(reply.route, reply.npu_busy_delta_us, shared=reply.npu_busy_shared),
    )


def _tei(body: RerankBody, texts: tuple[str, ...], reply: RerankReply) -> list[dict[str, Any]]:
    values = reply.logits if body.raw_scores else reply.scores
    return [
        {"index": index, "score": float(values[index])} | ({"text": texts[index]} if body.return_text else {})
        for index in reply.ranking()
    ]


def _cohere(
    body: RerankBody, texts: tuple[str, ...], reply: RerankReply, reply_id: str, *, version: str
) -> dict[str, Any]:
    scores = reply.scores
    results: list[dict[str, Any]] = []
    for index in reply.ranking()[: body.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
        if body.return_documents:
            given = body.documents[index] if body.documents is not None else texts[index]
            result["document"] = given.model_dump() if isinstance(given, Document) else {"text": given}
        results.append(result)
    timing = reply.timing
    meta: dict[str, Any] = {
        "api_version": {"version": version},
        "device": reply.route.device,
        "emulated": reply.route.emulated,
        "npu_busy_delta_us": reply.npu_busy_delta_us,
        "timing_ms": {
            "queue": timing.queue,
            "tokenize": timing.tokenize,
            "inference": timing.inference,
            "total": timing.total,
        },
    }
    return {
        "id": reply_id,
        "model": reply.route.model,
        "results": results,
        "usage": {"total_tokens": reply.usage.prompt_tokens},
        "meta": meta,
    }
