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
from worker_node.core.types import Busy, RequestContext, Route, Timing, Usage
from worker_node.engines.process import Canary
from worker_node.models.directory import InstalledModel, read_canary
from worker_node.serving.encoders import EncoderModel, EncoderTask, Floats, known_answers_canary, rows_run
from worker_node.serving.routing import Demand, reject_if_full
from worker_node.serving.row_tokenizer import RowTokenizer
from worker_node.serving.run import Services, run_single
from worker_node.serving.task import EnginePlan
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.rerank.task import RERANK, RerankCanary, RerankOptions


@dataclass(eq=False, slots=True)
class RerankModel(EncoderModel):
    """A served reranking model; a request may have `documents_limit` documents."""

    documents_limit: int = RerankOptions().documents_limit

    def facts(self) -> Mapping[str, Any]:
        return {"documents_limit": self.documents_limit}


@dataclass(frozen=True, slots=True)
class RerankReply:
    """`logits`: the log-odds that each document matches the query, f64 (n,), in the request's order."""

    route: Route
    logits: npt.NDArray[np.float64]
    usage: Usage
    timing: Timing
    busy: Busy

    @property
    def scores(self) -> npt.NDArray[np.float64]:
        return 1.0 / (1.0 + np.exp(-np.clip(self.logits, -700.0, 700.0)))

    def ranking(self) -> list[int]:
        """The documents' places in the request, best first; equal ones stay in the request's order."""
        return [int(index) for index in np.argsort(-self.logits, kind="stable")]


def log_odds(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The log-odds of a match, f64 [n], from a classifier's logits, f32 [n, labels], of one label or two (no, yes)."""
    wide = rows.astype(np.float64)
    return wide[:, 0] if wide.shape[1] == 1 else wide[:, 1] - wide[:, 0]


class RerankMetrics:
    unit = "documents"

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, labelnames=("model", "device"), registry=registry)
        self.made = self.documents = counter("npu_node_reranked_documents", "Documents scored")
        self.device_tokens = counter("npu_node_rerank_device_tokens", "Tokens computed for reranking, padding included")
        self.computed_tokens = counter(
            "npu_node_rerank_computed_tokens", "Tokens of the pairs computed for reranking, without padding"
        )


async def rerank(
    services: Services,
    context: RequestContext,
    query: str,
    documents: Sequence[str],
    name: str | None = None,
    *,
    truncate: bool = False,
    max_document_tokens: int | None = None,
    field: str = "documents",
) -> RerankReply:
    """Return how well each document matches the query, by the model of that `name` or the node's default one.

    Documents are cut at their end to `max_document_tokens`, and with `truncate` to what the model has room for. Errors
    call them by the request's `field`.
    """
    count = len(documents)
    with services.tracing.operation("rerank", {"npu.texts": count}) as operation:
        began = time.monotonic()
        model = await services.manager.model_of(RERANK, RerankModel, name, context.deadline)
        with model.activity.working():
            if count > (most := model.documents_limit):
                raise BadRequest(
                    f"{count} {field} in one request; {model.id} takes at most {most}: send them in parts", param=field
                )
            reject_if_full(model.placements, count, context)
            pairs = await model.tokenizer.encode_pairs(
                query,
                documents,
                truncate=truncate,
                max_document_tokens=max_document_tokens,
                field=field,
                deadline=context.deadline,
            )
            operation.begin("route")
            rows = [pair.ids for pair in pairs]
            demand = Demand.of_rows(model, rows, context)
            run = rows_run(rows, demand, context, began, time.monotonic(), second=[pair.query for pair in pairs])
            answer = await run_single(services, run, operation)
        route, result, usage = answer.route, answer.result, Usage(demand.token_count)
        logits = log_odds(result.rows(count))
        if not np.isfinite(logits).all():
            raise EngineUnavailable(
                f"{model.id} on {route.device} computed scores that are not numbers; try again or examine the device",
                retry_after=1.0,
            )
        operation.answered(usage, busy=result.busy)

    services.telemetry.finished(route, usage, answer.timing, busy=result.busy)
    own, labels = services.telemetry.own(RerankMetrics), (route.model, route.device)
    own.documents.labels(*labels).inc(count)
    if result.device_tokens is not None:
        own.device_tokens.labels(*labels).inc(result.device_tokens)
        own.computed_tokens.labels(*labels).inc(usage.prompt_tokens)
    return RerankReply(route, logits, usage, answer.timing, result.busy)


def _tolerance_fault(found: Floats, expected: Floats, most: float) -> str | None:
    """Whether the logits of known pairs are others than the CPU's were."""
    worst = float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max())
    return f"a logit is {worst:.4f} from the known one, at most {most:.4f} is right" if worst > most else None


class _Rerank(EncoderTask[RerankModel]):
    yields_to_chats = True

    def open(self, installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings) -> RerankModel:  # noqa: ARG002
        tokenizer = RowTokenizer(installed.path, installed.context_limit)
        return RerankModel(installed, tokenizer, wanted.of(RerankOptions).documents_limit)

    def canary(self, model: RerankModel, wanted: ModelSettings, plan: EnginePlan) -> Canary:
        known = read_canary(model.installed.path, RerankCanary)
        pairs = [model.tokenizer.pairs(query, [document], truncate=True)[0] for query, document in known.pairs]
        rows, second = [pair.ids for pair in pairs], [pair.query for pair in pairs]
        fault = partial(_tolerance_fault, most=known.tolerance)
        return known_answers_canary(rows, known.logits, plan, wanted, fault, second=second)


SERVING = _Rerank()
