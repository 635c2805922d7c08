"""The routes of reranking. TEI, Cohere and Jina name the fields of the body differently: the names tell them apart."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from aiohttp import web
from pydantic import Field, RootModel

from worker_node.core.errors import BadRequest, NodeError
from worker_node.http.body import DialectBody, Table, Unsupported, read_body
from worker_node.http.context import NODE, busy_fields, request_context, route_headers, timing_ms
from worker_node.http.replies import OVMS_PREFIX, Reply, describe, json_response, retry_headers
from worker_node.http.routes import JSON, ApiOperation, TaskApi
from worker_node.tasks.rerank.service import RerankMetrics, RerankReply, rerank

_ONE_FIELD = "documents are ranked by their text alone; send the fields that count as one text"
_TEXT_ONLY = "models here rank texts and give scores alone"

# Sources: the API references of Cohere, Jina, vLLM and text-embeddings-inference.
RERANK: Table = {
    "rank_fields": Unsupported(_ONE_FIELD, neutral=(["text"],)),
    "return_embeddings": Unsupported(_TEXT_ONLY),
    "truncate_prompt_tokens": Unsupported("documents are cut with max_tokens_per_doc", neutral=(-1,)),
    "truncation_direction": Unsupported("documents are cut at their end", neutral=("Right", "right")),
}


class Document(DialectBody):
    """A document as an object; what it holds beside its text is given back with it."""

    rules: ClassVar[Table] = {}

    text: str


class RerankBody(DialectBody):
    """Body of POST /rerank, /v1/rerank and /v2/rerank: `texts` as for TEI, or `documents` as for Cohere and Jina.

    `truncate` (Jina: `truncation`) false refuses documents that are too long, true cuts them at their end. TEI's form
    refuses by default, the other cuts.
    """

    rules: ClassVar[Table] = RERANK

    query: Annotated[str, Field(min_length=1)]
    model: str | None = None
    documents: list[str | Document] | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    truncation: bool | None = None
    texts: list[str] | None = None
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = None

    def given(self) -> tuple[str, tuple[str, ...]]:
        """The name of the field that holds the documents, and their texts. Raises BadRequest."""
        if (self.texts is None) == (self.documents is None):
            raise BadRequest(
                "send either documents (as to Cohere and Jina) or texts (as to TEI)",
                param="documents" if self.texts is None else "texts",
            )
        field = "documents" if self.texts is None else "texts"
        items = self.documents if self.texts is None else self.texts
        if not items:
            raise BadRequest(f"{field} is empty; send at least one", param=field)
        return field, tuple(item if isinstance(item, str) else item.text for item in items)


PATHS = {
    "/rerank": "TEI, Cohere, Jina: rank documents",
    "/v1/rerank": "Cohere, Jina: rank documents",
    "/v2/rerank": "Cohere: rank documents",
}


def error_response(error: NodeError) -> web.Response:
    """An error as Cohere's clients (`message`) and the node's own (`error`) read it."""
    return json_response({"message": error.message, "error": describe(error)}, error.status, retry_headers(error))


async def _rerank(request: web.Request) -> web.Response:
    context = request_context(request)
    body = await read_body(request, RerankBody)
    field, texts = body.given()
    cuts = body.truncation if body.truncate is None else body.truncate
    reply = await rerank(
        request.app[NODE].services,
        context,
        body.query,
        texts,
        body.model,
        truncate=body.texts is None if cuts is None else cuts,
        max_document_tokens=body.max_tokens_per_doc,
        field=field,
    )

    rendered: Any
    if body.texts is None:
        rendered = _cohere(body, texts, reply, context.request_id, version="2" if request.path == "/v2/rerank" else "1")
    else:
        values = reply.logits if body.raw_scores else reply.scores
        rendered = [
            {"index": index, "score": float(values[index])} | ({"text": texts[index]} if body.return_text else {})
            for index in reply.ranking()
        ]
    return json_response(rendered, headers=route_headers(reply.route, reply.busy))


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

    meta: dict[str, Any] = {
        "api_version": {"version": version},
        "device": reply.route.device,
        "emulated": reply.route.emulated,
        **busy_fields(reply.busy, whole=True),
        "timing_ms": timing_ms(reply.timing, "queue", "tokenize", "inference", "total"),
    }
    return {
        "id": reply_id,
        "model": reply.route.model,
        "results": results,
        "usage": {"total_tokens": reply.usage.prompt_tokens},
        "meta": meta,
    }


class RerankResult(Reply):
    """One document."""

    index: int
    relevance_score: float


class Reranked(Reply):
    """Reply to `documents`, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: dict[str, int]
    meta: dict[str, Any]


class RankedText(Reply):
    """One text, as TEI has it."""

    index: int
    score: float


class Ranked(RootModel[Reranked | list[RankedText]]):
    """Either, by the form of the request."""


API = TaskApi(
    operations=tuple(
        ApiOperation("post", path, _rerank, summary, {JSON: Ranked}, RerankBody, inference=True)
        for path, summary in PATHS.items()
    ),
    errors=dict.fromkeys((*PATHS, f"{OVMS_PREFIX}rerank"), error_response),
    metrics=RerankMetrics,
)
