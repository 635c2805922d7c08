"""POST /v1/completions: continue prompts as they stand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from aiohttp import web
from pydantic import Field

from worker_node.core.errors import BadRequest, UnsupportedParameter
from worker_node.core.types import Finished, FinishReason, Piece, RequestContext, Token, TokenIds, Usage
from worker_node.http import parameters
from worker_node.http.body import limited, read_body
from worker_node.http.context import request_context
from worker_node.http.leniency import NODE, Table
from worker_node.http.middleware import inference
from worker_node.http.ollama import keeping
from worker_node.tasks.generate.http.fields import COMPLETIONS, SamplingFields
from worker_node.tasks.generate.http.stream import (
    Envelope,
    collect,
    completion_logprobs,
    json_response,
    known_alternatives,
    new_id,
    stream_chunks,
    usage,
)
from worker_node.tasks.generate.model import GenerationRequest, generation_model
from worker_node.tasks.generate.service import ChoiceEvent, Choices, generate_choices, repeated
from worker_node.tasks.generate.tokenization import ChatTokenizer

# What OpenAI does with a request that names no length, and what its clients count on.
DEFAULT_MAX_TOKENS = 16
MAX_GENERATIONS = 128

Ids = Annotated[list[int], Field(min_length=1)]


class CompletionsBody(SamplingFields):
    """Body of POST /v1/completions."""

    rules: ClassVar[Table] = COMPLETIONS

    prompt: str | Annotated[list[str], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
    # 0 with `echo` asks for the prompt alone.
    max_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def prompts(self) -> list[str | TokenIds]:
        """The prompts, of which one may stand without a list around it."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: list[str | TokenIds] = []
        ids: list[int] = []
        for item in self.prompt:
            if isinstance(item, int):
                ids.append(item)
            else:
                prompts.append(item if isinstance(item, str) else TokenIds(tuple(item)))
        return [TokenIds(tuple(ids))] if ids else prompts

    @property
    def prompt_alone(self) -> bool:
        """Whether the prompt is to be computed and sent back, and not continued."""
        return self.max_tokens == 0

    def echoes(self, tokenizer: ChatTokenizer) -> list[str]:
        """With `echo`, what stands before each choice's own text. Raises UnsupportedParameter, BadRequest."""
        if not self.echo:
            return []
        if self.logprobs is not None:
            raise UnsupportedParameter(
                "echo: the engine tells no reliable probabilities of the prompt's tokens; leave logprobs out",
                param="echo",
            )
        return [
            text
            for prompt in self.prompts()
            for text in [_text_of(prompt, tokenizer, skip=self.skip_special_tokens is not False)] * (self.n or 1)
        ]

    def requests(self, context: RequestContext) -> list[GenerationRequest]:
        """One domain request for each prompt and choice, those of a prompt together."""
        count = self.n or 1
        if self.best_of not in {None, count}:
            raise BadRequest(
                "best_of: choices are not ranked here; leave it out or make it equal to n", param="best_of"
            )
        if self.prompt_alone and not self.echo:
            raise BadRequest(
                "max_tokens: 0 asks for no token; send 1 or more, or echo to get the prompt back", param="max_tokens"
            )
        # The engine computes a prompt only to continue it: of a prompt alone its one token is left out of the reply.
        most = 1 if self.prompt_alone else self.max_tokens or DEFAULT_MAX_TOKENS
        given = self.model_dump(exclude={"logprobs"}) | {"max_tokens": most}
        sampling = parameters.sampling(parameters.OPENAI, given, logprobs=self.logprobs is not None)
        prompts = self.prompts()
        grammar = self.held_to(None)
        if len(prompts) * count > MAX_GENERATIONS:
            raise BadRequest(
                f"{len(prompts)} prompts of {count} choices; a request may have {MAX_GENERATIONS} in all",
                param="prompt",
            )
        return [
            one
            for prompt in prompts
            for one in repeated(
                GenerationRequest(
                    self.urgency(context),
                    prompt,
                    sampling,
                    self.model,
                    grammar=grammar,
                    context_limit=self.num_ctx,
                    keep_last=self.keep_last,
                ),
                count,
            )
        ]


def _text_of(prompt: str | TokenIds, tokenizer: ChatTokenizer, *, skip: bool) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(tokenizer.check_ids(prompt.ids, "prompt"), skip_special_tokens=skip)


def _without_answers(choices: Choices) -> Choices:
    """The choices as if nothing had been generated."""

    async def ends() -> AsyncIterator[ChoiceEvent]:
        async for index, event in choices.events:
            if isinstance(event, Finished):
                usage_of_prompt = Usage(event.usage.prompt_tokens, 0)
                yield index, replace(event, finish_reason=FinishReason.LENGTH, usage=usage_of_prompt)

    return replace(choices, events=ends(), written=[0] * len(choices.runs))


class _Chunks:
    """See `ChunkRenderer`."""

    kind = "text_completion"

    def __init__(self, top: int, echoes: list[str]) -> None:
        self._top = top
        self._echoes = echoes
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> list[dict[str, Any]]:
        if not self._echoes:
            return []
        return [{"index": index, "text": self._echoes[index], "logprobs": None, "finish_reason": None}]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        if not isinstance(piece, Token):
            return []
        logprobs = None
        if piece.logprobs:
            offset = self._offsets.get(index, 0)
            logprobs = completion_logprobs(piece.logprobs, self._top, offset)
            self._offsets[index] = offset + sum(len(token.text) for token in piece.logprobs)
        return [{"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}]

    def closing(self, index: int, finished: Finished) -> list[dict[str, Any]]:
        return [{"index": index, "text": "", "logprobs": None, "finish_reason": finished.finish_reason}]


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [web.post("/v1/completions", inference(_completions))]


async def _completions(request: web.Request) -> web.StreamResponse:
    node = request.app[NODE]
    context = request_context(request)
    body = await read_body(request, CompletionsBody)
    count = body.n or 1
    top = limited(request, "logprobs", body.logprobs or 0, known_alternatives(body.temperature))
    echoes = body.echoes((await generation_model(node.manager, body.model, context.deadline)).tokenizer)
    async with (
        keeping(request, body.model, body.keep_alive),
        generate_choices(node.services, body.requests(context), whole=not body.stream) as made,
    ):
        choices = _without_answers(made) if body.prompt_alone else made
        envelope = Envelope(new_id("cmpl-"), choices.routes[0].model)
        if body.stream:
            return await stream_chunks(
                request,
                choices,
                envelope,
                _Chunks(top, echoes),
                usage_of=body.usage_of_chunks,
                choices_per_prompt=count,
            )
        outcomes = await collect(choices)
    ends = [end for _, end in outcomes]
    reply = envelope.wrap(
        "text_completion",
        [
            {
                "index": index,
                "text": (echoes[index] if echoes else "") + outcome.text,
                "logprobs": None if body.logprobs is None else completion_logprobs(outcome.logprobs, top),
                "finish_reason": end.finish_reason,
            }
            for index, (outcome, end) in enumerate(outcomes)
        ],
    )
    reply["usage"] = usage(ends, count)
    return json_response(reply, choices.routes[0], ends)
