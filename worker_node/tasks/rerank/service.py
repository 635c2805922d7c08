"""Rerank documents: tokenize, choose a placement, run, and count. Every dialect calls `rerank`.

Also how reranking models are opened, and the canary that an engine must pass before it is ready.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter

from worker_node.core.errors import BadRequest, EngineUnavailable
from worker_node.core.types import NOT_MEASURED, Busy, RequestContext, Route, Timing, Usage
from worker_node.encoders.jobs import row_job
from worker_node.engines.process import Canary
from worker_node.models.directory import InstalledModel, read_canary
from worker_node.observability.metrics import Telemetry
from worker_node.observability.tracing import Operation
from worker_node.serving.encoders import (
    EncoderModel,
    EncoderTask,
    Floats,
    known_answers_canary,
    known_that_fit,
    rows_run,
)
from worker_node.serving.routing import Demand, reject_if_full
from worker_node.serving.run import Services, run_single
from worker_node.serving.task import EnginePlan
from worker_node.serving.tokenizing import Pair, RowTokenizer
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.rerank.task import RERANK, RerankCanary, RerankOptions


@dataclass(eq=False, slots=True)
class RerankModel(EncoderModel):
    """A served reranking model; a request may have `documents_limit` documents."""

    documents_limit: int = RerankOptions().documents_limit

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

    @property
    def scores(self) -> npt.NDArray[np.float64]:
        """How well each document matches, from 0 to 1."""
        return 1.0 / (1.0 + np.exp(-np.clip(self.logits, -700.0, 700.0)))

    def ranking(self) -> list[int]:
        """The documents' places in the request, best first; equal ones stay in the request's order."""
        return [int(index) for index in np.argsort(-self.logits, kind="stable")]


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
        counter = partial(Counter, labelnames=("model", "device"), registry=registry)
        self.documents = counter("npu_node_reranked_documents", "Documents scored")
        self.device_tokens = counter("npu_node_rerank_device_tokens", "Tokens computed for reranking, padding included")
        self.computed_tokens = counter(
            "npu_node_rerank_computed_tokens", "Tokens of the pairs computed for reranking, without padding"
        )


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
        model = await services.manager.model_of(RERANK, RerankModel, request.model, request.context.deadline)
        with model.activity.working():
            reply = await _rerank(services, model, request, operation, began)
        operation.answered(reply.usage, busy=reply.busy)
    services.telemetry.finished(reply.route, reply.usage, reply.timing, busy=reply.busy)
    own, labels = services.telemetry.own(RerankMetrics), (reply.route.model, reply.route.device)
    own.documents.labels(*labels).inc(len(reply.logits))
    if reply.device_tokens is not None:
        own.device_tokens.labels(*labels).inc(reply.device_tokens)
        own.computed_tokens.labels(*labels).inc(reply.usage.prompt_tokens)
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
    pairs = await model.tokenizer.encode_pairs(
        request.query,
        request.documents,
        truncate=request.truncate,
        max_document_tokens=request.max_document_tokens,
        field=request.field,
        deadline=context.deadline,
    )
    operation.begin("route")
    rows = [pair.ids for pair in pairs]
    demand = Demand.of_rows(model, rows, context)
    run = rows_run(rows, demand, context, began, time.monotonic(), second=[pair.query for pair in pairs])
    answer = await run_single(services, run, operation)
    logits = log_odds(answer.result.rows(count))
    if not np.isfinite(logits).all():
        raise EngineUnavailable(
            f"{model.id} on {answer.route.device} computed scores that are not numbers; try again or examine the "
            "device",
            retry_after=1.0,
        )
    return RerankReply(
        answer.route,
        logits,
        Usage(demand.token_count),
        answer.timing,
        answer.result.busy,
        answer.result.device_tokens,
    )


def rerank_canary(pairs: Sequence[Pair], logits: Sequence[Sequence[float]], tolerance: float) -> Canary:
    """The check that the engine's logits of known pairs are what the CPU gave, within a tolerance."""
    expected = np.asarray(logits, np.float32)
    ids, second = [pair.ids for pair in pairs], [pair.query for pair in pairs]

    def fault(found: Floats) -> str | None:
        worst = float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max())
        if worst > tolerance:
            return f"a logit is {worst:.4f} from the known one, at most {tolerance:.4f} is right"
        return None

    return known_answers_canary(lambda deadline: row_job(ids, deadline, second=second), expected.shape, fault)


class _Rerank(EncoderTask[RerankModel]):
    yields_to_chats = True

    def open(self, installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings) -> RerankModel:  # noqa: ARG002
        tokenizer = RowTokenizer(installed.path, installed.context_limit)
        return RerankModel(installed, tokenizer, wanted.of(RerankOptions).documents_limit)

    def canary(self, model: RerankModel, wanted: ModelSettings, plan: EnginePlan) -> Canary:
        known = read_canary(model.installed.path, RerankCanary)
        pairs = [model.tokenizer.pairs(query, [document], truncate=True)[0] for query, document in known.pairs]
        fitting = known_that_fit([len(pair.ids) for pair in pairs], plan.prompt_limit, wanted)
        return rerank_canary([pairs[i] for i in fitting], [known.logits[i] for i in fitting], known.tolerance)


SERVING = _Rerank()
