"""A generation before it is routed: the prompt in tokens, the grammar, what the request demands of a placement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from worker_node.core.errors import BadRequest, ContextLengthExceeded, NodeError
from worker_node.core.types import Picture, Sampling
from worker_node.engines.protocol import TOKEN_DTYPE
from worker_node.scheduling.routing import Candidate, Feature
from worker_node.serving.places import Demand, reject_if_full
from worker_node.serving.run import Services
from worker_node.tasks.generate.messages import GenerateJob, RawPicture
from worker_node.tasks.generate.serving.forms import answer_form
from worker_node.tasks.generate.serving.large_texts import large_texts
from worker_node.tasks.generate.serving.model import GenerationModel
from worker_node.tasks.generate.serving.picture_metrics import PictureMetrics
from worker_node.tasks.generate.serving.pictures import check_pictures, picture_decoder, pictures_of
from worker_node.tasks.generate.serving.prompting import Prepared, checked_sampling, prepare
from worker_node.tasks.generate.serving.requests import GenerationRequest
from worker_node.tasks.generate.serving.schemas import schema_compiler


@dataclass(frozen=True, slots=True)
class PreparedGeneration:
    """A request with its model found and its prompt tokenized; nothing has been decided or run.

    The `request` has the sampling that it left open filled in.
    """

    request: GenerationRequest
    model: GenerationModel
    prompt: Prepared
    demand: Demand


async def prepare_generation(
    services: Services, model: GenerationModel, request: GenerationRequest
) -> PreparedGeneration:
    """Decode the pictures, compile the schema and tokenize.

    Raises BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded.
    """
    pixels = await _decode_pictures(services, model, request)
    grammar = request.grammar if isinstance(request.grammar, str) else None
    if (form := answer_form(model.installed.family, request)) is not None:
        grammar = await services.parts.of(schema_compiler).grammar(form, request.context)
    request = replace(request, sampling=checked_sampling(model, request))
    prompt = await prepare(services.parts.of(large_texts), model, request, grammar, pixels)
    _check_amounts(model, request.sampling)
    count, wanted = prompt.count, request.sampling.max_new_tokens
    # Room that the request could not use is no reason to leave a placement.
    room = min(request.context.min_new_tokens, wanted or request.context.min_new_tokens)
    _check_window(model, request, count + room)
    demand = Demand(
        model.id,
        model.placements,
        prompt_tokens=count,
        token_count=count,
        min_new_tokens=room,
        require=request.context.require_device,
        needs=_needs(request.sampling),
    )
    return PreparedGeneration(request, model, prompt, demand)


async def _decode_pictures(
    services: Services, model: GenerationModel, request: GenerationRequest
) -> dict[str, RawPicture]:
    """The pixels of the request's pictures by field; refuses the request before that if the queue is full."""
    note = _unnoted if request.context.dry_run else partial(services.telemetry.own(PictureMetrics).count, model.id)
    try:
        pictures = check_pictures(services.manager, model, request)
    except NodeError as error:
        for picture in pictures_of(request.prompt):
            note(picture, 0, error.code)
        raise
    if not request.context.dry_run:
        reject_if_full(model.placements, 1, request.context)
    if not pictures or model.pictures is None:
        return {}
    return await services.parts.of(picture_decoder).decode(pictures, model.pictures, request.context.deadline, note)


def _check_amounts(model: GenerationModel, sampling: Sampling) -> None:
    """Raise BadRequest for more tokens or answers than the model gives to one request."""
    wanted = sampling.max_new_tokens
    if wanted is not None and wanted > model.max_tokens_limit:
        raise BadRequest(
            f"{wanted} new tokens were asked for; {model.id} gives at most {model.max_tokens_limit} here",
            param="max_new_tokens",
        )
    if sampling.choices > model.best_of_limit:
        raise BadRequest(
            f"{sampling.choices} answers were asked for; {model.id} gives at most {model.best_of_limit} to one "
            "request here",
            param="n",
        )


def _needs(sampling: Sampling) -> frozenset[Feature]:
    """What not every placement can do."""
    wanted: dict[Feature, bool] = {"n": sampling.choices > 1, "logprobs": sampling.logprobs}
    return frozenset(feature for feature, asked in wanted.items() if asked)


def _check_window(model: GenerationModel, request: GenerationRequest, tokens: int) -> None:
    """Raise ContextLengthExceeded if the request's own limit of its context holds less than so many tokens.

    A limit beyond the model's is listed as limited: Ollama clamps it.
    """
    window = request.context_limit
    if window is None:
        return
    if window > (widest := max(placement.total_limit for placement in model.placements)):
        request.context.note_limited("num_ctx", widest)
    if tokens > window:
        raise ContextLengthExceeded(
            f"num_ctx {window}: the prompt and the least answer have {tokens} tokens", param="num_ctx"
        )


def generate_job(request: GenerationRequest, prepared: Prepared, candidate: Candidate, limit: int) -> GenerateJob:
    """The job for the engine of `candidate`; an answer gets at most `limit` tokens and what the window leaves."""
    sampling = request.sampling
    window = min(candidate.total_limit, request.context_limit or candidate.total_limit)
    room = min(limit, window - prepared.count)
    return GenerateJob(
        id=0,
        tokens=np.asarray(prepared.tokens, TOKEN_DTYPE).tobytes(),
        max_new_tokens=room if sampling.max_new_tokens is None else min(room, sampling.max_new_tokens),
        deadline=request.context.deadline,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        interactive=request.context.interactive,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logprobs=sampling.logprobs,
        grammar=prepared.grammar,
        min_new_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        seen=prepared.seen,
    )


def _unnoted(_picture: Picture, _size: int, _refusal: str | None) -> None:
    """An image that is only explained is neither taken nor refused."""
