"""Embed texts: tokenize, route, admit, run. Every dialect comes through here."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_node.core.types import RequestContext, Route, Timing, Usage
from worker_node.observability.tracing import Operation
from worker_node.scheduling.admission import Work
from worker_node.serving.places import Demand, reject_if_full, select_placement
from worker_node.serving.run import Proof, Services, SingleRun, run_placed
from worker_node.tasks.embed.calls import EmbeddingOutput
from worker_node.tasks.embed.messages import Embedded, embed_job
from worker_node.tasks.embed.serving.cache import embedding_cache
from worker_node.tasks.embed.serving.forms import check_dimensions, cut, space_of, with_prompt
from worker_node.tasks.embed.serving.metrics import count_cached, count_embedding
from worker_node.tasks.embed.serving.model import EmbeddingModel, embedding_model
from worker_node.tasks.embed.serving.requests import EmbeddingReply, EmbeddingRequest
from worker_node.tasks.embed.serving.tracing import trace_embedding


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
    tokens, space = prepared.tokens, space_of(model, request.dimensions)
    place = await select_placement(prepared.demand, context, units=len(tokens))
    operation.routed(place.route)
    if not tokens:
        empty = np.empty((0, request.dimensions or model.dimensions), np.float32)
        return EmbeddingReply(place.route, empty, space, Usage(0), _untouched(context.arrived))
    known = _look_up(services, prepared, place.route, context)
    missing = [index for index, vector in enumerate(known) if vector is None]
    count_cached(services.telemetry, place.route, hits=len(tokens) - len(missing), misses=len(missing))
    usage = Usage(place.route.token_count)
    if not missing:
        vectors = cut(np.stack([vector for vector in known if vector is not None]), request.dimensions)
        times = _untouched(context.arrived)
        reply = EmbeddingReply(place.route, vectors, space, usage, times, cached="hit", loading_s=place.loading_s)
    else:
        rows = [tokens[index] for index in missing]
        answer = await run_placed(services, _run_of(prepared, context, rows, began, tokenized), place, operation)
        output = EmbeddingOutput.of(answer.result, len(rows))
        services.parts.of(embedding_cache).keep(model.space, answer.route.device, rows, output.vectors)
        reply = EmbeddingReply(
            answer.route,
            cut(_merge(known, missing, output.vectors), request.dimensions),
            space,
            usage,
            answer.timing,
            output.busy_us,
            output.busy_shared,
            output.device_tokens,
            computed_tokens=sum(map(len, rows)),
            cached="partial" if len(missing) < len(tokens) else None,
            loading_s=place.loading_s,
        )
    count_embedding(services.telemetry, reply)
    return reply


def _look_up(
    services: Services, prepared: PreparedEmbedding, route: Route, context: RequestContext
) -> list[npt.NDArray[np.float32] | None]:
    """The cached vector of each text, None where there is none."""
    # A vector that was computed for an earlier request proves nothing for this one.
    if Proof.of(route, context, strict=services.require_proof).required:
        return [None] * len(prepared.tokens)
    return services.parts.of(embedding_cache).look_up(prepared.model.space, route.device, prepared.tokens)


def _run_of(
    prepared: PreparedEmbedding, context: RequestContext, rows: list[list[int]], began: float, tokenized: float
) -> SingleRun[Embedded]:
    """The run that computes the vectors of these rows of token ids."""
    return SingleRun(
        prepared.demand,
        context,
        embed_job(rows, context.deadline, interactive=context.interactive),
        Embedded,
        len(rows),
        lambda limits: Work(sum(limits.computed_tokens(len(row)) for row in rows)),
        began,
        tokenized,
    )


def _merge(
    known: list[npt.NDArray[np.float32] | None], missing: list[int], computed: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """The vectors of all texts in order: `known` ones from the cache, those of `missing` indices as `computed`."""
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
    """Tokenize the texts, with the model's prompts, and derive what the request demands of a placement.

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
    """The timing of a request that ran on no device."""
    return Timing(queue=0.0, tokenize=0.0, inference=0.0, total=(time.monotonic() - arrived) * 1e3)
