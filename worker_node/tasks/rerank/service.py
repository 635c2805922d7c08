"""Rerank documents: tokenize, choose a placement, run, and count. Every dialect calls `rerank`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter

from worker_node.core.errors import BadRequest, EngineUnavailable
from worker_node.core.types import NOT_MEASURED, Busy, RequestContext, Route, Timing, Usage
from worker_node.encoders.jobs import RowJob, RowResult, row_job
from worker_node.manager.served import ServedModel
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import Operation
from worker_node.scheduling.admission import AdmissionLimits, Work
from worker_node.serving.routing import Demand, reject_if_full
from worker_node.serving.run import Services, SingleRun, model_of, run_single
from worker_node.serving.tokenizing import text_ids
from worker_node.tasks.rerank.options import RerankOptions
from worker_node.tasks.rerank.task import RERANK
from worker_node.tasks.rerank.tokenizer import Pair, PairTokenizer


@dataclass(eq=False, slots=True)
class RerankModel(ServedModel):
    """A served reranking model; a request may have `documents_limit` documents."""

    tokenizer: PairTokenizer
    documents_limit: int = RerankOptions().documents_limit

    async def token_ids(self, text: str, *, special: bool, deadline: float) -> list[int]:
        return await text_ids(self.tokenizer.whole, text, self.tokenizer.limit, special=special, deadline=deadline)

    def facts(self) -> Mapping[str, Any]:
        return {"documents_limit": self.documents_limit}


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """Documents to score for a query with one model; `model` None means the node's default reranking model.

    Documents are cut at their end to `max_document_tokens`, and with `truncate` to what the model has room for. Errors
    call them by the request's `field`.
    """

    context: RequestContext
    query: str
    documents: tuple[str, ...]
    model: str | None = None
    truncate: bool = False
    max_document_tokens: int | None = None
    field: str = "documents"


@dataclass(frozen=True, slots=True)
class RerankReply:
    """`logits`: the log-odds that each document matches the query, f64 (n,), in the request's order.

    The NPU's busy time and device tokens are as in `EmbeddingReply`.
    """

    route: Route
    logits: npt.NDArray[np.float64]
    usage: Usage
    timing: Timing
    busy: Busy = NOT_MEASURED
    device_tokens: int | None = None
    loading_s: float = 0.0

    @property
    def scores(self) -> npt.NDArray[np.float64]:
        """How well each document matches, from 0 to 1."""
        return 1.0 / (1.0 + np.exp(-np.clip(self.logits, -700.0, 700.0)))

    def ranking(self) -> list[int]:
        """The documents' places in the request, best first; equal ones stay in the request's order."""
        return [int(index) for index in np.argsort(-self.logits, kind="stable")]


def pair_job(pairs: Sequence[Pair], deadline: float, *, interactive: bool = True) -> RowJob:
    """The job for pairs."""
    ids, second = [pair.ids for pair in pairs], [pair.query for pair in pairs]
    return row_job(ids, deadline, interactive=interactive, second=second)


def log_odds(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The log-odds of a match, f64 [n], from a classifier's logits, f32 [n, labels].

    With one label that is its logit (so the score is its sigmoid); with two the second's less the first's (so the score
    is the softmax of the second).
    """
    wide = rows.astype(np.float64)
    return wide[:, 0] if wide.shape[1] == 1 else wide[:, 1] - wide[:, 0]


class RerankMetrics:
    """The task's own metrics, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"npu_node_{name}", text, ("model", "device"), registry=registry)

        self.documents = counter("reranked_documents", "Documents scored")
        self._device_tokens = counter("rerank_device_tokens", "Tokens computed for reranking, padding included")
        self._tokens = counter("rerank_computed_tokens", "Tokens of the pairs computed for reranking, without padding")

    def reranked(self, reply: RerankReply) -> None:
        """Count a finished request."""
        labels = (reply.route.model, reply.route.device)
        self.documents.labels(*labels).inc(len(reply.logits))
        if reply.device_tokens is not None:
            self._device_tokens.labels(*labels).inc(reply.device_tokens)
            self._tokens.labels(*labels).inc(reply.usage.prompt_tokens)


def declare_rerank_metrics(telemetry: Telemetry) -> None:
    """Create the metrics at start, so that they are exported from then on."""
    telemetry.made["documents"] = telemetry.own(RerankMetrics).documents


async def rerank(services: Services, request: RerankRequest) -> RerankReply:
    """Return how well each document matches the query.

    Raises ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded, EngineUnavailable,
    ModelLoading, DeviceUnavailable, NpuNotProven.
    """
    with services.tracing.operation("rerank", {"npu.texts": len(request.documents)}) as operation:
        began = time.monotonic()
        model = await model_of(services.manager, RERANK, RerankModel, request.model, request.context.deadline)
        with model.activity.working():
            reply = await _rerank(services, model, request, operation, began)
        operation.answered(reply.usage, busy=reply.busy)
    services.telemetry.finished(reply.route, reply.usage, reply.timing, busy=reply.busy)
    services.telemetry.own(RerankMetrics).reranked(reply)
    return reply


async def _rerank(
    services: Services, model: RerankModel, request: RerankRequest, operation: Operation, began: float
) -> RerankReply:
    context, count = request.context, len(request.documents)
    if count > model.documents_limit:
        raise BadRequest(
            f"{count} {request.field} in one request; {model.id} takes at most {model.documents_limit}: send them in "
            "parts",
            param=request.field,
        )
    reject_if_full(model.placements, count, context)
    pairs = await model.tokenizer.encode(
        request.query,
        request.documents,
        truncate=request.truncate,
        max_document_tokens=request.max_document_tokens,
        field=request.field,
        deadline=context.deadline,
    )
    lengths = [len(pair.ids) for pair in pairs]
    operation.begin("route")
    usage = Usage(sum(lengths))
    demand = Demand(
        model.id,
        model.placements,
        prompt_tokens=max(lengths),
        token_count=usage.prompt_tokens,
        require=context.require_device,
    )

    def work(limits: AdmissionLimits) -> Work:
        return Work(sum(map(limits.computed_tokens, lengths)))

    job = pair_job(pairs, context.deadline, interactive=context.interactive)
    run = SingleRun(demand, context, job, RowResult, count, work, began, time.monotonic())
    answer = await run_single(services, run, operation)
    result, route = answer.result, answer.route
    logits = log_odds(result.rows(count))
    if not np.isfinite(logits).all():
        raise EngineUnavailable(
            f"{model.id} on {route.device} computed scores that are not numbers; try again or examine the device",
            retry_after=1.0,
        )
    return RerankReply(
        route,
        logits,
        usage,
        answer.timing,
        result.busy,
        result.device_tokens,
        answer.loading_s,
    )
