"""Generate text: tokenize, route, admit, run, detokenize. Every dialect comes through here."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from worker_node.domain import (
    Finished,
    FinishReason,
    GenerationRequest,
    Piece,
    Route,
    Timing,
    TokenLogprob,
    Usage,
)
from worker_node.manager.placement import Placement
from worker_node.scheduling.admission import Permit, Work
from worker_node.serving.answer_text import AnswerText
from worker_node.serving.models import GenerationModel, generation_model
from worker_node.serving.pictures import pictures_of
from worker_node.serving.pieces import PieceReader
from worker_node.serving.places import Place, errors_of, find_place
from worker_node.serving.prepared_generation import PreparedGeneration, generate_job, prepare_generation
from worker_node.serving.proof import Proof, after_first
from worker_node.serving.rerun import Runs, run_again
from worker_node.serving.services import Services
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta
from worker_node.telemetry import Telemetry
from worker_node.tracing.base import Operation


@dataclass(slots=True)
class AnswerProgress:
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
    progress: AnswerProgress
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
        seeing = bool(pictures_of(request.prompt))
        model = await generation_model(services.manager, request.model, seeing=seeing)
        in_use.enter_context(model.activity.used_by(context))
        prepared = await prepare_generation(services, model, request)
        request = prepared.request
        tokenize_s = time.monotonic() - began
        operation.tokenized(began)
        place = await find_place(prepared.demand, context)
        operation.routed(place.route)
        prompt = prepared.prompt
        job = generate_job(request, prompt, place.candidate, prepared.model.max_tokens_limit)
        work = Work(prompt.count, job.max_new_tokens, exact=job.ignore_eos)

        def permit(placement: Placement) -> AbstractContextManager[Permit]:
            return placement.admission.permit(1, context.deadline, work=work, interactive=context.interactive)

        runs = Runs(prepared.demand, context, place, permit)
        with errors_of(lambda: runs.place.route), runs.admitted():
            proof = Proof.of(place.route, context, strict=services.require_proof)
            watch = _Watch(operation, services.telemetry, proof, progress := AnswerProgress())
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
    progress: AnswerProgress


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
    prompt_tokens = prompt.count
    finish = FinishReason.STOP
    text = AnswerText(model.tokenizer, request.sampling)
    use = request.tool_use
    reader = PieceReader(prompt.parser, single=use is not None and use.single)

    def job(place: Place) -> GenerateJob:
        return generate_job(request, prompt, place.candidate, model.max_tokens_limit)

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
            prompt_tokens = delta.prompt_tokens or prompt_tokens
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
        usage=Usage(prompt_tokens, completion_tokens, reasoning_tokens),
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
