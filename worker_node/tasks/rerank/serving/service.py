"""Rerank documents: tokenize, route, admit, run. Every dialect comes through here."""

from __future__ import annotations

import time

import numpy as np

from worker_node.core.errors import BadRequest, EngineUnavailable
from worker_node.core.types import Usage
from worker_node.observability.tracing import Operation
from worker_node.scheduling.admission import AdmissionLimits, Work
from worker_node.serving.places import Demand, reject_if_full
from worker_node.serving.run import Services, SingleRun, model_of, run_single
from worker_node.tasks.rerank.kind import RERANK
from worker_node.tasks.rerank.messages import Scored, rerank_job
from worker_node.tasks.rerank.serving.metrics import RerankMetrics
from worker_node.tasks.rerank.serving.model import RerankModel, RerankReply, RerankRequest, log_odds


async def rerank(services: Services, request: RerankRequest) -> RerankReply:
    """Return how well each document matches the query.

    Raises ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded, EngineUnavailable,
    ModelLoading, DeviceUnavailable, NpuNotProven.
    """
    with services.tracing.operation("rerank", request.context, {"npu.texts": len(request.documents)}) as operation:
        began = time.monotonic()
        model = await model_of(services.manager, RERANK, RerankModel, request.model, request.context.deadline)
        with model.activity.used_by(request.context):
            reply = await _rerank(services, model, request, operation, began)
        operation.answered(reply.usage, busy_us=reply.npu_busy_delta_us, busy_shared=reply.npu_busy_shared)
    services.telemetry.finished(
        reply.route,
        reply.usage,
        reply.timing,
        busy_us=reply.npu_busy_delta_us,
        busy_shared=reply.npu_busy_shared,
    )
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
    if not context.dry_run:
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
    operation.tokenized(began)
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

    job = rerank_job(pairs, context.deadline, interactive=context.interactive)
    run = SingleRun(demand, context, job, Scored, count, work, began, time.monotonic())
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
        result.busy_us,
        result.busy_shared,
        result.device_tokens,
        answer.loading_s,
    )
