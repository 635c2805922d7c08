"""Embed texts: tokenize, route, admit, run. Every dialect comes through here."""

from __future__ import annotations

import time

import numpy as np

from worker_node.domain import EmbeddingReply, EmbeddingRequest, Priority, Route, Timing, Usage
from worker_node.routing import choose
from worker_node.serving.registry import Registry


async def embed(registry: Registry, request: EmbeddingRequest) -> EmbeddingReply:
    """Return the vectors of the request's texts, in order.

    Raises ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded, EngineUnavailable,
    ModelLoading, DeviceUnavailable.
    """
    context = request.context
    model = registry.embedding(request.model)
    began = time.monotonic()
    tokens = await model.tokenizer.encode(request.texts, truncate=request.truncate)
    tokenized = time.monotonic()
    count = sum(map(len, tokens))
    decision = choose(
        model.id,
        [placement.candidate() for placement in model.placements],
        prompt_tokens=max(map(len, tokens), default=0),
        require=context.require_device,
    )
    placement = model.placements[decision.index]
    route = Route(model.id, placement.device, decision.reason, count, placement.emulated)
    if not tokens:
        empty = np.empty((0, model.dimensions), np.float32)
        return EmbeddingReply(route, empty, model.space, Usage(0), _timing(context.arrived))
    with placement.admission.permit(len(tokens), context.deadline):
        output = await placement.engine.embed(
            tokens, deadline=context.deadline, interactive=context.priority is Priority.INTERACTIVE
        )
    timing = _timing(
        context.arrived,
        queue=output.started - tokenized,
        tokenize=tokenized - began,
        inference=output.inference_s,
    )
    reply = EmbeddingReply(route, output.vectors, model.space, Usage(count), timing, output.busy_us)
    registry.telemetry.embedded(reply)
    return reply


def _timing(arrived: float, queue: float = 0.0, tokenize: float = 0.0, inference: float = 0.0) -> Timing:
    return Timing(
        queue=queue * 1e3,
        tokenize=tokenize * 1e3,
        inference=inference * 1e3,
        total=(time.monotonic() - arrived) * 1e3,
    )
