"""The HTTP side of the task."""

from __future__ import annotations

from typing import Any

from pydantic import RootModel

from worker_node.api.dialects import OVMS_PREFIX
from worker_node.api.operation import ApiOperation
from worker_node.api.replies import Reply
from worker_node.api.task import TaskApi
from worker_node.tasks.rerank.api.body import RerankBody
from worker_node.tasks.rerank.api.routes import PATHS, error_response, routes
from worker_node.tasks.rerank.serving.metrics import declare_rerank_metrics


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


_SUMMARIES = {
    "/rerank": "TEI, Cohere, Jina: rank documents",
    "/v1/rerank": "Cohere, Jina: rank documents",
    "/v2/rerank": "Cohere: rank documents",
}

API = TaskApi(
    routes=routes,
    operations=tuple(
        ApiOperation("post", path, _SUMMARIES[path], {"application/json": Ranked}, RerankBody, inference=True)
        for path in PATHS
    ),
    errors=dict.fromkeys((*PATHS, f"{OVMS_PREFIX}rerank"), error_response),
    metrics=declare_rerank_metrics,
)
