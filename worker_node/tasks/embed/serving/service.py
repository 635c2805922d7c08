"""Embed texts: tokenize, route, admit, run. Every dialect comes through here."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_node.domain import Timing, Usage
from worker_node.scheduling.admission import Work
from worker_node.serving.places import reject_if_full, select_placement
from worker_node.serving.proof import Proof
from worker_node.serving.services import Services
from worker_node.serving.single import SingleRun, run_placed
from worker_node.serving.verdict import Demand
from worker_node.tasks.embed.calls import EmbeddingOutput
from worker_node.tasks.embed.messages import Embedded, embed_job
from worker_node.tasks.embed.serving.cache import embedding_cache
from worker_node.tasks.embed.serving.forms import check_dimensions, cut, space_of, with_prompt
from worker_node.tasks.embed.serving.metrics import count_cached, count_embedding
from worker_node.tasks.embed.serving.model import EmbeddingModel, embedding_model
from worker_node.tasks.embed.serving.requests import EmbeddingReply, EmbeddingRequest
from worker_node.tasks.embed.serving.tracing import trace_embedding
from worker_node.tracing.base import Operation


async def embed(services: Services, request: EmbeddingRequest) -> EmbeddingReply:
    """Return the vectors of the request's texts, in order.

    Raises ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded, EngineUnavailable,
    ModelLoading, DeviceUnavailable.
    """
    with trace_embedding(services.tracing, request) as operation:
        began = time.monotonic()
        model = await embedding_model(services.manager, request.model, request.context.deadline)
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
    place = await select_placement(prepared.demand, context, units=len(tokens))
    route = place.route
    operation.routed(route)
    space = space_of(model, request.dimensions)
    if not tokens:
        empty = np.empty((0, request.dimensions or model.dimensions), np.float32)
        return EmbeddingReply(route, empty, space, Usage(0), _untouched(context.arrived))
    # A vector that was computed for an earlier request proves nothing for this one.
    known: list[npt.NDArray[np.float32] | None] = [None] * len(tokens)
    if not Proof.of(route, context, strict=services.require_proof).required:
        known = services.parts.of(embedding_cache).look_up(model.space, route.device, tokens)
    missing = [index for index, vector in enumerate(known) if vector is None]
    count_cached(services.telemetry, route, hits=len(tokens) - len(missing), misses=len(missing))
    usage = Usage(route.token_count)
    if not missing:
        vectors = np.stack([vector for vector in known if vector is not None])
        reply = EmbeddingReply(
            route,
            cut(vectors, request.dimensions),
            space,
            usage,
            _untouched(context.arrived),
            cached="hit",
            loading_s=place.loading_s,
        )
    else:
        wanted = [tokens[index] for index in missing]
        run = SingleRun(
            prepared.demand,
            context,
            embed_job(wanted, context.deadline, interactive=context.interactive),
            Embedded,
            len(wanted),
            lambda limits: Work(sum(limits.computed_tokens(len(row)) for row in wanted)),
            began,
            tokenized,
        )
        answer = await run_placed(services, run, place, operation)
        route, output = answer.route, EmbeddingOutput.of(answer.result, len(wanted))
        services.parts.of(embedding_cache).keep(model.space, route.device, wanted, output.vectors)
        reply = EmbeddingReply(
            route,
            cut(_merge(known, missing, output.vectors), request.dimensions),
            space,
            usage,
            answer.timing,
            output.busy_us,
            output.busy_shared,
            output.device_tokens,
            computed_tokens=sum(map(len, wanted)),
            cached="partial" if len(missing) < len(tokens) else None,
            loading_s=place.loading_s,
        )
    count_embedding(services.telemetry, reply)
    return reply


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
    """Count the tokens, those of the model's prompts too.

    Raises ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded.
    """
    check_dimensions(model, request.dimensions)
    texts = with_prompt(model, request.texts, request.input_type)
    if not request.context.dry_run:
        reject_if_full(model.placements, len(request.texts), request.context)
    tokens = await model.tokenizer.encode(texts, truncate=request.truncate, deadline=request.context.deadline)
    demand = Demand(
        model.id,
        model.placements,
        prompt_tokens=max(map(len, tokens), default=0),
        token_count=sum(map(len, tokens)),
        require=request.context.require_device,
    )
    return PreparedEmbedding(model, tokens, demand)


def _untouched(arrived: float) -> Timing:
    """The times of a request that no device worked on."""
    return Timing(queue=0.0, tokenize=0.0, inference=0.0, total=(time.monotonic() - arrived) * 1e3)
