"""Embed texts: tokenize, route, admit, run. Every dialect comes through here."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from worker_node.domain import EmbeddingReply, EmbeddingRequest, RequestContext, Timing, Usage
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Permit, Work
from worker_node.serving.models import EmbeddingModel, embedding_model
from worker_node.serving.places import errors_of, find_place, turn_away
from worker_node.serving.proof import Proof
from worker_node.serving.rerun import Runs, run_again
from worker_node.serving.services import Services
from worker_node.serving.verdict import Demand
from worker_node.tasks.embed.calls import EmbeddingOutput
from worker_node.tasks.embed.messages import Embedded, embed_job
from worker_node.tracing.base import Operation


async def embed(services: Services, request: EmbeddingRequest) -> EmbeddingReply:
    """Return the vectors of the request's texts, in order.

    Raises ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded, EngineUnavailable,
    ModelLoading, DeviceUnavailable.
    """
    with services.tracing.embedding(request) as operation:
        began = time.monotonic()
        model = await embedding_model(services.manager, request.model)
        with model.activity.used_by(request.context):
            reply = await _embed(services, model, request, operation, began)
        operation.answered(
            reply.usage, busy_us=reply.npu_busy_delta_us, busy_shared=reply.npu_busy_shared, cached=reply.cached
        )
        return reply


async def _embed(
    services: Services, model: EmbeddingModel, request: EmbeddingRequest, operation: Operation, began: float
) -> EmbeddingReply:
    context = request.context
    prepared = await prepare_embedding(model, request)
    tokenized = time.monotonic()
    operation.tokenized(began)
    tokens = prepared.tokens
    place = await find_place(prepared.demand, context, units=len(tokens))
    route = place.route
    operation.routed(route)
    if not tokens:
        empty = np.empty((0, model.dimensions), np.float32)
        return EmbeddingReply(route, empty, model.space, Usage(0), _timing(context.arrived))
    proof = Proof.of(route, context, strict=services.require_proof)
    # A vector that was computed for an earlier request proves nothing for this one.
    known: list[npt.NDArray[np.float32] | None] = [None] * len(tokens)
    if not proof.required:
        known = services.cache.look_up(model.space, route.device, tokens)
    missing = [index for index, vector in enumerate(known) if vector is None]
    services.telemetry.cached(route, hits=len(tokens) - len(missing), misses=len(missing))
    usage = Usage(route.token_count)
    if not missing:
        vectors = np.stack([vector for vector in known if vector is not None])
        reply = EmbeddingReply(
            route,
            vectors,
            model.space,
            usage,
            _timing(context.arrived),
            cached="hit",
            loading_s=place.loading_s,
        )
    else:
        wanted = [tokens[index] for index in missing]

        def permit(placement: Placement) -> AbstractContextManager[Permit]:
            admission = placement.admission
            work = Work(sum(admission.limits.computed_tokens(len(row)) for row in wanted))
            return admission.permit(len(wanted), context.deadline, work=work, interactive=context.interactive)

        runs = Runs(prepared.demand, context, place, permit)
        with errors_of(lambda: runs.place.route), runs.admitted():
            operation.submitted(place.placement.engine)
            output = await _run(runs, wanted, context)
        route = runs.place.route
        operation.ran(output.started, output.started + output.inference_s)
        with errors_of(lambda: route):
            proof.check(output.busy_us)
        route = replace(route, unproven=proof.unread)
        services.cache.keep(model.space, route.device, wanted, output.vectors)
        timing = _timing(
            context.arrived,
            queue=output.started - tokenized,
            tokenize=tokenized - began,
            inference=output.inference_s,
        )
        reply = EmbeddingReply(
            route,
            _merge(known, missing, output.vectors),
            model.space,
            usage,
            timing,
            output.busy_us,
            output.busy_shared,
            output.device_tokens,
            computed_tokens=sum(map(len, wanted)),
            cached="partial" if len(missing) < len(tokens) else None,
            loading_s=place.loading_s,
        )
    services.telemetry.embedded(reply)
    return reply


async def _run(runs: Runs, rows: list[list[int]], context: RequestContext) -> EmbeddingOutput:
    """Have the texts embedded, over as many runs as it takes."""
    job = embed_job(rows, context.deadline, interactive=context.interactive)
    async with aclosing(run_again(runs, lambda _place: job, Embedded)) as results:
        output = EmbeddingOutput.of(await anext(results), len(rows))
    runs.permit.measured(output.measured_tokens, output.measured_s)
    return output


def _merge(
    known: list[npt.NDArray[np.float32] | None], missing: list[int], computed: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """The vectors of all texts in order, from those that were known and those that were computed now."""
    if len(missing) == len(known):
        return computed
    vectors = np.empty((len(known), computed.shape[1]), np.float32)
    vectors[missing] = computed
    for index, vector in enumerate(known):
        if vector is not None:
            vectors[index] = vector
    return vectors


@dataclass(frozen=True, slots=True)
class PreparedEmbedding:
    """A request with its model found and its texts tokenized; nothing has been decided or run."""

    model: EmbeddingModel
    tokens: list[list[int]]
    demand: Demand


async def prepare_embedding(model: EmbeddingModel, request: EmbeddingRequest) -> PreparedEmbedding:
    """Count the tokens. Raises ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded."""
    if not request.context.dry_run:
        turn_away(model.placements, len(request.texts), request.context)
    tokens = await model.tokenizer.encode(request.texts, truncate=request.truncate)
    demand = Demand(
        model.id,
        model.placements,
        prompt_tokens=max(map(len, tokens), default=0),
        token_count=sum(map(len, tokens)),
        require=request.context.require_device,
    )
    return PreparedEmbedding(model, tokens, demand)


def _timing(arrived: float, queue: float = 0.0, tokenize: float = 0.0, inference: float = 0.0) -> Timing:
    return Timing(
        queue=queue * 1e3,
        tokenize=tokenize * 1e3,
        inference=inference * 1e3,
        total=(time.monotonic() - arrived) * 1e3,
    )
