"""Generate text: tokenize, route, admit, run, detokenize. Every dialect comes through here."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np

from worker_node.domain import (
    Finished,
    FinishReason,
    GenerationRequest,
    Piece,
    Route,
    Sampling,
    Timing,
    TokenLogprob,
    Usage,
)
from worker_node.engines.messages import TOKEN_DTYPE
from worker_node.errors import BadRequest, ContextLengthExceeded
from worker_node.manager.placement import Placement
from worker_node.routing import Candidate, Feature
from worker_node.scheduling.admission import Permit, Work
from worker_node.serving.answer_text import AnswerText
from worker_node.serving.forms import answer_form
from worker_node.serving.models import GenerationModel, generation_model
from worker_node.serving.pieces import PieceReader
from worker_node.serving.places import Demand, Place, errors_of, find_place, turn_away
from worker_node.serving.prompting import Prepared, check_sampling, prepare
from worker_node.serving.proof import Proof, after_first
from worker_node.serving.rerun import Runs, run_again
from worker_node.serving.sampling_defaults import completed
from worker_node.serving.services import Services
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta
from worker_node.telemetry import Telemetry
from worker_node.tracing.base import Operation


@dataclass(slots=True)
class Progress:
    """How many tokens of an answer have been generated."""

    tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRun:
    """A generation that has been routed and admitted: its headers are known, its tokens are still to come.

    It waited for `loading_s` seconds for its model to be loaded.
    """

    runs: Runs
    proof: Proof
    events: AsyncIterator[Piece | Finished]
    progress: Progress
    loading_s: float = 0.0

    @property
    def route(self) -> Route:
        """Where it runs now; it may be run again elsewhere until its first token is out."""
        return replace(self.runs.place.route, unproven=self.proof.unread)

    def head(self) -> Route:
        """The route for a head that is sent before the first token: from then on it stays on that device."""
        self.runs.tell_device()
        return self.route


@asynccontextmanager
async def generate(services: Services, request: GenerationRequest) -> AsyncIterator[GenerationRun]:
    """Run a generation for as long as the block lasts; leaving it early cancels the generation within one token.

    Raises, before the block: ModelNotFound, BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded,
    EngineUnavailable, ModelLoading, DeviceUnavailable; while iterating: EngineUnavailable, DeadlineExceeded,
    Overloaded.
    """
    context = request.context
    with services.tracing.generation(request) as operation, ExitStack() as in_use:
        began = time.monotonic()
        model = await generation_model(services.manager, request.model)
        in_use.enter_context(model.activity.used_by(context))
        prepared = await prepare_generation(services, model, request)
        request = prepared.request
        tokenize_s = time.monotonic() - began
        operation.tokenized(began)
        place = await find_place(prepared.demand, context)
        operation.routed(place.route)
        prompt = prepared.prompt
        job = _job(request, prompt, place.candidate, prepared.model.max_tokens_limit)
        work = Work(len(prompt.tokens), job.max_new_tokens, exact=job.ignore_eos)

        def permit(placement: Placement) -> AbstractContextManager[Permit]:
            return placement.admission.permit(1, context.deadline, work=work, interactive=context.interactive)

        runs = Runs(prepared.demand, context, place, permit)
        with errors_of(lambda: runs.place.route), runs.admitted():
            proof = Proof.of(place.route, context, strict=services.require_proof)
            watch = _Watch(operation, services.telemetry, proof, progress := Progress())
            async with (
                aclosing(_run(request, prepared, runs, tokenize_s, watch)) as events,
                aclosing(_counted(services.telemetry, operation, runs, events)) as counted,
            ):
                if not proof.required:
                    yield GenerationRun(runs, proof, counted, progress, place.loading_s)
                    return
                # The first token shows whether the NPU works, while the status can still say so.
                async with aclosing(await after_first(counted)) as proven:
                    yield GenerationRun(runs, proof, proven, progress, place.loading_s)


@dataclass(frozen=True, slots=True)
class _Watch:
    """Who observes a generation: its trace, the metrics, the proof that the NPU works, the answer's length."""

    operation: Operation
    telemetry: Telemetry
    proof: Proof
    progress: Progress


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
    """Compile the schema and tokenize. Raises BadRequest, ContextLengthExceeded, Overloaded, DeadlineExceeded."""
    if not request.context.dry_run:
        turn_away(model.placements, 1, request.context)
    grammar = request.grammar if isinstance(request.grammar, str) else None
    if (form := answer_form(model.installed.family, request)) is not None:
        grammar = await services.schemas.grammar(form, request.context)
    request = replace(request, sampling=completed(request.sampling, model.sampling_defaults, model.max_tokens_limit))
    check_sampling(model, request)
    prompt = await prepare(services.texts, model, request, grammar)
    count = len(prompt.tokens)
    wanted = request.sampling.max_new_tokens
    if wanted is not None and wanted > model.max_tokens_limit:
        raise BadRequest(
            f"{wanted} new tokens were asked for; {model.id} gives at most {model.max_tokens_limit} here",
            param="max_new_tokens",
        )
    if request.sampling.choices > model.best_of_limit:
        raise BadRequest(
            f"{request.sampling.choices} answers were asked for; {model.id} gives at most {model.best_of_limit} to one "
            "request here",
            param="n",
        )
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


def _needs(sampling: Sampling) -> frozenset[Feature]:
    """What not every placement can do."""
    wanted: dict[Feature, bool] = {"n": sampling.choices > 1, "logprobs": sampling.logprobs}
    return frozenset(feature for feature, asked in wanted.items() if asked)


def _check_window(model: GenerationModel, request: GenerationRequest, tokens: int) -> None:
    """Raise ContextLengthExceeded if the request's own limit of its context holds less than so many tokens."""
    window = request.context_limit
    if window is None:
        return
    if window > (widest := max(placement.total_limit for placement in model.placements)):
        raise ContextLengthExceeded(f"num_ctx {window}: {model.id} has at most {widest} here", param="num_ctx")
    if tokens > window:
        raise ContextLengthExceeded(
            f"num_ctx {window}: the prompt and the least answer have {tokens} tokens", param="num_ctx"
        )


async def _counted(
    telemetry: Telemetry, operation: Operation, runs: Runs, events: AsyncIterator[Piece | Finished]
) -> AsyncGenerator[Piece | Finished, None]:
    # Here as well as around the whole: a reply that streams renders the error itself, inside of the caller's block.
    with errors_of(lambda: runs.place.route), operation.watch():
        async for event in events:
            if isinstance(event, Finished):
                telemetry.generated(runs.place.route, event)
                operation.answered(
                    event.usage,
                    finish_reason=event.finish_reason.value,
                    busy_us=event.npu_busy_delta_us,
                    busy_shared=event.npu_busy_shared,
                )
            yield event


def _job(request: GenerationRequest, prepared: Prepared, candidate: Candidate, limit: int) -> GenerateJob:
    sampling = request.sampling
    window = min(candidate.total_limit, request.context_limit or candidate.total_limit)
    room = min(limit, window - len(prepared.tokens))
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
    )


async def _run(
    request: GenerationRequest,
    prepared: PreparedGeneration,
    runs: Runs,
    tokenize_s: float,
    watch: _Watch,
) -> AsyncGenerator[Piece | Finished, None]:
    """Yield pieces as they become certain, then `Finished`. A stop sequence ends the generation in the engine too."""
    model, prompt = prepared.model, prepared.prompt
    arrived = request.context.arrived
    submitted = started = time.monotonic()
    watch.operation.submitted(runs.place.placement.engine)
    first_token: float | None = None
    completion_tokens = reasoning_tokens = 0
    busy_us, busy_shared = None, False
    finish = FinishReason.STOP
    text = AnswerText(model.tokenizer, request.sampling)
    use = request.tool_use
    reader = PieceReader(prompt.parser, single=use is not None and use.single)

    def job(place: Place) -> GenerateJob:
        return _job(request, prompt, place.candidate, model.max_tokens_limit)

    async with aclosing(run_again(runs, job, TokenDelta)) as deltas:
        async for delta in deltas:
            if first_token is None:
                count = watch.telemetry.token_counter(runs.place.route)
                watch.proof.check(delta.busy_us)
                first_token = time.monotonic()
                started = delta.started or submitted
                watch.operation.started(started)
                watch.operation.first_token(delta.at or first_token)
            completion_tokens += len(delta.tokens)
            watch.progress.tokens = completion_tokens
            count(len(delta.tokens))
            runs.permit.progressed(len(delta.tokens), at=delta.at, prefilled=(delta.prefilled, delta.prefill_s))
            logprobs = _logprobs(model, delta) if delta.logprobs else ()
            for piece in reader.read(text.push(delta.tokens), logprobs):
                yield piece
            reasoning_tokens += len(delta.tokens) if reader.reasoning else 0
            busy_us, busy_shared = delta.busy_us, delta.busy_shared
            if text.ended or delta.finish is not None:
                watch.operation.ended(delta.at or time.monotonic())
                runs.permit.answered(by_itself=text.ended or delta.finish == FinishReason.STOP)
            if text.ended:
                break
            if delta.finish is not None:
                finish = FinishReason(delta.finish)
    watch.proof.check(busy_us)
    for piece in reader.finish(text.flush()):
        yield piece
    now = time.monotonic()
    yield Finished(
        finish_reason=_reason(finish, stopped=text.ended, called=reader.called),
        usage=Usage(len(prompt.tokens), completion_tokens, reasoning_tokens),
        timing=Timing(
            queue=max(0.0, started - submitted) * 1e3,
            tokenize=tokenize_s * 1e3,
            inference=(now - started) * 1e3,
            total=(now - arrived) * 1e3,
            first_token=None if first_token is None else (first_token - arrived) * 1e3,
        ),
        npu_busy_delta_us=busy_us,
        npu_busy_shared=busy_shared,
        stop_sequence=text.matched,
    )


def _reason(finish: FinishReason, *, stopped: bool, called: bool) -> FinishReason:
    if stopped:
        return FinishReason.STOP
    # An answer that was cut within a call is cut, not a call.
    return FinishReason.TOOL_CALLS if called and finish is FinishReason.STOP else finish


def _logprobs(model: GenerationModel, delta: TokenDelta) -> tuple[TokenLogprob, ...]:
    """The probabilities of the tokens that are text; special ones, as the end of the answer, are none."""
    pieces = [
        (model.tokenizer.piece(token), value) for token, value in zip(delta.tokens, delta.logprobs or (), strict=True)
    ]
    return tuple(TokenLogprob(piece.decode("utf-8", "replace"), piece, value) for piece, value in pieces if piece)
