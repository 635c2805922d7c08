"""OpenAI's POST /v1/chat/completions and /v1/completions: answer a conversation, continue prompts as they stand."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from secrets import token_hex
from typing import Annotated, Any, ClassVar, Literal

import orjson
from aiohttp import web
from pydantic import Field

from worker_node.core.errors import BadRequest, NodeError
from worker_node.core.types import RequestContext
from worker_node.http.body import limited, read_body
from worker_node.http.context import busy_fields, request_context
from worker_node.http.errors import describe_error
from worker_node.http.leniency import Table
from worker_node.http.ollama import keeping
from worker_node.http.replies import OpenAIUsage, Reply
from worker_node.http.sse import event_frame
from worker_node.http.task import EVENTS, JSON, ApiOperation
from worker_node.tasks.generate.answer import Block, BlockEvent, BlockKind, Finished, Grown, Opened
from worker_node.tasks.generate.http.conversation import (
    AllowedChoice,
    ChatMessage,
    Choice,
    FunctionTool,
    NamedChoice,
    OfferedTool,
    ResponseFormat,
    conversation,
    schema_of,
    tool_of,
    tool_use,
)
from worker_node.tasks.generate.http.fields import CHAT, COMPLETIONS, NumberOf, SamplingFields, StreamOptions, rendering
from worker_node.tasks.generate.http.replies import (
    Ask,
    Renderer,
    answering,
    busy_of,
    chat_logprobs,
    completion_logprobs,
    known_alternatives,
)
from worker_node.tasks.generate.request import GenerationRequest, TokenIds, ToolUse
from worker_node.tasks.generate.service import ChoiceEvent, Choices, repeated

# What OpenAI does with a completion that names no length, and what its clients count on.
DEFAULT_MAX_TOKENS = 16
MAX_GENERATIONS = 128


async def _chat(request: web.Request) -> Ask:
    context = request_context(request)
    body = await read_body(request, ChatBody)
    top = body.top_logprobs or 0
    if top:
        top = limited(request, "top_logprobs", top, known_alternatives(body.temperature))
    return _ask(request, body, body.requests(context), partial(_Chat, body, top))


async def _completions(request: web.Request) -> Ask:
    context = request_context(request)
    body = await read_body(request, CompletionsBody)
    top = limited(request, "logprobs", body.logprobs or 0, known_alternatives(body.temperature))
    return _ask(request, body, body.requests(context), partial(_Completion, body, top))


def _ask(
    request: web.Request,
    body: SamplingFields,
    requests: list[GenerationRequest],
    renderer: Callable[[Choices], Renderer],
) -> Ask:
    if body.keep_alive is None:
        return Ask(requests, renderer, bool(body.stream))
    return Ask(requests, renderer, bool(body.stream), keeping(request, body.model, body.keep_alive))


class _Rendered(Renderer):
    """What both routes share: an object around the choices, with one id and one time for the whole of a reply."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, body: SamplingFields, choices: Choices) -> None:
        options = body.stream_options or StreamOptions()
        self._choices = choices
        self._choices_per_prompt, self._returned = body.generations, body.n or 1
        self._with_ids = bool(body.return_token_ids)
        self._with_usage = bool(options.include_usage)
        self._usage_in_chunks = bool(options.continuous_usage_stats)
        self._fields = {
            "id": f"{self.id_prefix}{token_hex(12)}",
            "created": int(time.time()),
            "model": choices.runs[0].model,
        }
        # Without usage the JSON around the choice is the same in every chunk.
        self._head = b"data: " + orjson.dumps(self._object(self.chunk_kind, []))[:-2]
        self._ends: list[Finished] = []

    def opening(self) -> bytes:
        indices = range(len(self._choices.runs))
        return b"".join(self._chunk(part, 0) for index in indices if (part := self._opening(index)) is not None)

    def event(self, event: ChoiceEvent) -> bytes:
        if not isinstance(event.event, Finished):
            part = self._part(event.choice, event.event)
            return b"" if part is None else self._chunk(part, event.tokens)
        self._ends.append(event.event)
        complete = len(self._ends) == len(self._choices.runs)
        busy = busy_fields(busy_of(self._ends)) if complete else {}
        last = self._chunk(self._closing(event.choice, event.event), event.tokens, busy)
        if not complete:
            return last
        if self._with_usage:
            last += event_frame(self._object(self.chunk_kind, []) | {"usage": self._usage(self._ends)} | busy)
        return last + b"data: [DONE]\n\n"

    def failure(self, error: NodeError) -> bytes:
        """There is no `[DONE]` after it."""
        return event_frame({"error": describe_error(error)})

    def whole(self, ends: Sequence[Finished]) -> dict[str, Any]:
        kept = _best(ends, self._choices_per_prompt, self._returned)
        choices = [self._whole(index, ends[best]) for index, best in enumerate(kept)]
        return self._object(self.kind, choices) | {"usage": self._usage(ends)}

    def _opening(self, index: int) -> dict[str, Any] | None:  # noqa: ARG002
        return None

    @abstractmethod
    def _part(self, index: int, event: BlockEvent) -> dict[str, Any] | None: ...
    @abstractmethod
    def _closing(self, index: int, finished: Finished) -> dict[str, Any]: ...
    @abstractmethod
    def _whole(self, index: int, finished: Finished) -> dict[str, Any]: ...

    def _token_ids(self, finished: Finished) -> dict[str, Any]:
        return {"token_ids": finished.token_ids} if self._with_ids else {}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._fields | {"object": kind, "choices": choices}

    def _chunk(self, part: dict[str, Any], tokens: int, busy: dict[str, Any] | None = None) -> bytes:
        if not self._with_usage and not busy:
            return self._head + orjson.dumps(part) + b"]}\n\n"
        body = self._object(self.chunk_kind, [part])
        if self._with_usage:
            prompt = self._choices.routes[part["index"]].token_count
            body["usage"] = _token_usage(prompt, tokens) if self._usage_in_chunks else None
        return event_frame(body | (busy or {}))

    def _usage(self, finished: Sequence[Finished]) -> dict[str, int]:
        """Tokens in and out, of all choices; a prompt counts once, however many choices continue it."""
        # As the engine counted them: before, those of images are an estimate.
        prompt = sum(end.usage.prompt_tokens for end in finished) // self._choices_per_prompt
        return _token_usage(prompt, sum(end.usage.completion_tokens for end in finished))


def _best(ends: Sequence[Finished], per_prompt: int, count: int) -> Iterator[int]:
    """Those to return of the generations of each prompt: as OpenAI ranks them, by the log probability of a token."""
    for first in range(0, len(ends), per_prompt):
        group = range(first, first + per_prompt)
        yield from sorted(group, key=lambda one: -ends[one].mean_logprob)[:count] if per_prompt > count else group


def _token_usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


# Chat.


class ChatBody(SamplingFields):
    """Body of POST /v1/chat/completions."""

    rules: ClassVar[Table] = CHAT
    takes_images: ClassVar[bool] = True

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: NumberOf | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def requests(self, context: RequestContext) -> list[GenerationRequest]:
        """One domain request for each choice."""
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs: only with logprobs: true", param="top_logprobs")
        if self.modalities is not None and self.modalities != ["text"]:
            raise BadRequest('modalities: must be ["text"]; nothing else is supported', param="modalities")
        request = GenerationRequest(
            tool_use=self._tool_use(context),
            prompt=conversation(self.messages),
            model=self.model,
            grammar=self.held_to(schema_of(self.response_format)),
            split_reasoning=True,
            context_limit=self.num_ctx,
            rendering=rendering(
                self.chat_template_kwargs,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
            ),
            context=self.urgency(context),
            sampling=self.sampling(logprobs=bool(self.logprobs)),
            sent_as=self.names | {"prompt": "messages"},
        )
        return repeated(request, self.generations) if self.generations > 1 else [request]

    def _tool_use(self, context: RequestContext) -> ToolUse | None:
        if self.tools is None and self.tool_choice is None:
            return None
        tools = []
        for index, tool in enumerate(self.tools or []):
            if isinstance(tool, FunctionTool):
                strict = tool.function.strict is True
                tools.append(tool_of(tool.function, f"tools[{index}].function", strict=strict))
            else:
                context.note_ignored(f"tools.{tool.type}")
        single = self.parallel_tool_calls is False
        match self.tool_choice:
            case NamedChoice(function=function):
                return tool_use(tools, "required", [function.name], single=single)
            case AllowedChoice(allowed_tools=allowed):
                names = [tool.function.name for tool in allowed.tools if isinstance(tool, NamedChoice)]
                return tool_use(tools, allowed.mode, names, single=single)
            case mode:
                return tool_use(tools, mode, single=single)


class _Chat(_Rendered):
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, body: ChatBody, top_logprobs: int, choices: Choices) -> None:
        super().__init__(body, choices)
        self._top = top_logprobs
        self._logprobs = bool(body.logprobs)

    def _opening(self, index: int) -> dict[str, Any]:
        return _delta(index, {"role": "assistant", "content": ""})

    def _part(self, index: int, event: BlockEvent) -> dict[str, Any] | None:
        block = event.block
        if isinstance(event, Grown):
            match block.kind:
                case BlockKind.CALL:
                    call = {"index": block.call, "function": {"arguments": event.text}}
                    return _delta(index, {"tool_calls": [call]})
                case BlockKind.REASONING:
                    return _delta(index, {"reasoning_content": event.text})
            part = _delta(index, {"content": event.text})
            if event.logprobs:
                part["logprobs"] = chat_logprobs(event.logprobs, self._top)
            return part
        if isinstance(event, Opened) and block.kind is BlockKind.CALL:
            return _delta(index, {"tool_calls": [{"index": block.call, **_call(block, "")}]})
        return None

    def _closing(self, index: int, finished: Finished) -> dict[str, Any]:
        return _delta(index, {}, finished.finish_reason)

    def _whole(self, index: int, finished: Finished) -> dict[str, Any]:
        return {
            "index": index,
            "message": _message(finished),
            "logprobs": chat_logprobs(finished.logprobs, self._top) if self._logprobs else None,
            "finish_reason": finished.finish_reason,
            **self._token_ids(finished),
        }


def _message(finished: Finished) -> dict[str, Any]:
    text, reasoning, calls = finished.text(), finished.text(BlockKind.REASONING), finished.calls
    # With calls and no words there is no content, not an empty one.
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call(block, block.text) for block in calls]
    return message


def _call(block: Block, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{block.id}", "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _delta(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(Reply):
    """POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage


# Completions.

Ids = Annotated[list[int], Field(min_length=1)]


class CompletionsBody(SamplingFields):
    """Body of POST /v1/completions."""

    rules: ClassVar[Table] = COMPLETIONS

    prompt: str | Annotated[list[str], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
    # 0 is refused with what to do.
    max_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def prompts(self) -> list[str | TokenIds]:
        """The prompts; a single one need not be in a list."""
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

    def requests(self, context: RequestContext) -> list[GenerationRequest]:
        """One domain request for each prompt and choice, those of a prompt together."""
        count = self.generations
        if self.max_tokens == 0:
            raise BadRequest(
                "max_tokens: must be 1 or more, got 0; /tokenize counts the tokens of a prompt", param="max_tokens"
            )
        most = self.max_tokens or DEFAULT_MAX_TOKENS
        sampling = self.sampling(logprobs=self.logprobs is not None, max_tokens=most)
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
                    sent_as=self.names,
                ),
                count,
            )
        ]


class _Completion(_Rendered):
    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, body: CompletionsBody, top_logprobs: int, choices: Choices) -> None:
        super().__init__(body, choices)
        self._top = top_logprobs
        self._logprobs = body.logprobs is not None
        self._offsets: dict[int, int] = {}

    def _part(self, index: int, event: BlockEvent) -> dict[str, Any] | None:
        if not isinstance(event, Grown):
            return None
        logprobs = None
        if event.logprobs:
            offset = self._offsets.get(index, 0)
            logprobs = completion_logprobs(event.logprobs, self._top, offset)
            self._offsets[index] = offset + sum(len(token.text) for token in event.logprobs)
        return _text_choice(index, event.text, logprobs)

    def _closing(self, index: int, finished: Finished) -> dict[str, Any]:
        return _text_choice(index, "", finish=finished.finish_reason)

    def _whole(self, index: int, finished: Finished) -> dict[str, Any]:
        logprobs = completion_logprobs(finished.logprobs, self._top) if self._logprobs else None
        return _text_choice(index, finished.text(), logprobs, finished.finish_reason) | self._token_ids(finished)


def _text_choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class TextChoice(Reply):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None


class Completion(Reply):
    """POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: OpenAIUsage


OPERATIONS = (
    ApiOperation(
        "post",
        "/v1/completions",
        answering(_completions),
        "OpenAI: continue text",
        {JSON: Completion, EVENTS: None},
        CompletionsBody,
        inference=True,
    ),
    ApiOperation(
        "post",
        "/v1/chat/completions",
        answering(_chat),
        "OpenAI: answer a conversation",
        {JSON: ChatCompletion, EVENTS: None},
        ChatBody,
        inference=True,
    ),
)
