"""Generate text: tokenize, route, admit, run, detokenize. Every dialect comes through here."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import numpy as np

from worker_node.domain import (
    Device,
    Finished,
    FinishReason,
    GenerationRequest,
    Priority,
    Route,
    Sampling,
    Timing,
    Token,
    TokenIds,
    Usage,
)
from worker_node.engines.base import TOKEN_DTYPE, GenerateJob
from worker_node.errors import BadRequest, UnsupportedParameter
from worker_node.routing import Candidate
from worker_node.serving.detokenize import StopMatcher
from worker_node.serving.placement import Placement
from worker_node.serving.places import Demand, find_place
from worker_node.serving.registry import GenerationModel, Registry
from worker_node.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class GenerationRun:
    """A generation that has been routed and admitted: its headers are known, its tokens are still to come."""

    route: Route
    events: AsyncIterator[Token | Finished]


@asynccontextmanager
async def generate(registry: Registry, request: GenerationRequest) -> AsyncIterator[GenerationRun]:
    """Run a generation for as long as the block lasts; leaving it early cancels the generation within one token.

    Raises, before the block: ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded,
    EngineUnavailable, ModelLoading, DeviceUnavailable; while iterating: EngineUnavailable, DeadlineExceeded,
    Overloaded.
    """
    context = request.context
    began = time.monotonic()
    prepared = prepare_generation(registry, request)
    tokenize_s = time.monotonic() - began
    place = await find_place(prepared.demand, context)
    _refuse_unsupported(place.route, request.sampling)
    job = _job(request, prepared.prompt, place.candidate)
    with place.placement.admission.permit(1, context.deadline):
        async with (
            aclosing(_run(request, prepared.model, place.placement, job, tokenize_s, len(prepared.prompt))) as events,
            aclosing(_counted(registry.telemetry, place.route, events)) as counted,
        ):
            yield GenerationRun(place.route, counted)


@dataclass(frozen=True, slots=True)
class PreparedGeneration:
    """A request with its model found and its prompt tokenized; nothing has been decided or run."""

    model: GenerationModel
    prompt: list[int]
    demand: Demand


def prepare_generation(registry: Registry, request: GenerationRequest) -> PreparedGeneration:
    """Find the model and count the prompt's tokens. Raises ModelNotFound, BadRequest, ContextLengthExceeded."""
    model = registry.generation(request.model)
    prompt = _encode(model, request)
    if not prompt:
        raise BadRequest("the prompt is empty: there is nothing to continue", param="prompt")
    wanted = request.sampling.max_new_tokens
    demand = Demand(
        model.id,
        model.placements,
        prompt_tokens=len(prompt),
        token_count=len(prompt),
        # An open-ended request takes what room there is, but at least one token.
        max_new_tokens=1 if wanted is None else wanted,
        require=request.context.require_device,
    )
    return PreparedGeneration(model, prompt, demand)


def _refuse_unsupported(route: Route, sampling: Sampling) -> None:
    """Raise UnsupportedParameter for what the NPU's pipeline cannot do."""
    if route.device is Device.NPU and sampling.logprobs:
        raise UnsupportedParameter(
            f"{route.model} on NPU gives no log probabilities; leave them out or require another device",
            param="logprobs",
        )


async def _counted(
    telemetry: Telemetry, route: Route, events: AsyncIterator[Token | Finished]
) -> AsyncGenerator[Token | Finished, None]:
    async for event in events:
        if isinstance(event, Finished):
            telemetry.generated(route, event)
        yield event


def _encode(model: GenerationModel, request: GenerationRequest) -> list[int]:
    if isinstance(request.prompt, str):
        return model.tokenizer.encode_prompt(request.prompt)
    if isinstance(request.prompt, TokenIds):
        return model.tokenizer.check_ids(request.prompt.ids)
    return model.tokenizer.encode_chat(request.prompt)


def _job(request: GenerationRequest, prompt: list[int], candidate: Candidate) -> GenerateJob:
    sampling = request.sampling
    room = candidate.total_limit - len(prompt)
    return GenerateJob(
        id=0,
        tokens=np.asarray(prompt, TOKEN_DTYPE).tobytes(),
        max_new_tokens=room if sampling.max_new_tokens is None else sampling.max_new_tokens,
        deadline=request.context.deadline,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        interactive=request.context.priority is Priority.INTERACTIVE,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logprobs=sampling.logprobs,
    )


async def _run(
    request: GenerationRequest,
    model: GenerationModel,
    placement: Placement,
    job: GenerateJob,
    tokenize_s: float,
    prompt_tokens: int,
) -> AsyncGenerator[Token | Finished, None]:
    """Yield text as it becomes certain, then `Finished`. A stop sequence ends the generation in the engine too."""
    arrived = request.context.arrived
    submitted = time.monotonic()
    started = submitted
    first_token: float | None = None
    completion_tokens = 0
    busy_us, busy_shared = None, False
    finish = FinishReason.STOP
    detokenizer = model.tokenizer.detokenizer()
    stop = StopMatcher(request.sampling.stop)
    async with aclosing(placement.engine.generate(job)) as deltas:
        async for delta in deltas:
            if first_token is None:
                first_token = time.monotonic()
                started = delta.started or submitted
            completion_tokens += len(delta.tokens)
            if text := stop.push(detokenizer.push(delta.tokens)):
                yield Token(text)
            busy_us, busy_shared = delta.busy_us, delta.busy_shared
            if stop.matched is not None:
                break
            if delta.finish is not None:
                finish = FinishReason(delta.finish)
    if stop.matched is None and (text := stop.push(detokenizer.flush()) + stop.flush()):
        yield Token(text)
    now = time.monotonic()
    yield Finished(
        finish_reason=FinishReason.STOP if stop.matched is not None else finish,
        usage=Usage(prompt_tokens, completion_tokens),
        timing=Timing(
            queue=max(0.0, started - submitted) * 1e3,
            tokenize=tokenize_s * 1e3,
            inference=(now - started) * 1e3,
            total=(now - arrived) * 1e3,
            first_token=None if first_token is None else (first_token - arrived) * 1e3,
        ),
        npu_busy_delta_us=busy_us,
        npu_busy_shared=busy_shared,
        stop_sequence=stop.matched,
    )
