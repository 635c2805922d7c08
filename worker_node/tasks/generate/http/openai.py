"""OpenAI's POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from secrets import token_hex
from typing import Annotated, Any, ClassVar, Literal

import orjson
from aiohttp import web
from pydantic import Field

from worker_node.core.errors import BadRequest, NodeError
from worker_node.core.types import RequestContext
from worker_node.http.body import Table, Unsupported
from worker_node.http.context import busy_fields, busy_of
from worker_node.http.replies import OpenAIUsage, Reply, describe_error
from worker_node.http.sse import event_frame
from worker_node.tasks.generate.blocks import Block, BlockKind, Event, Finished, Grown, Opened
from worker_node.tasks.generate.http.conversation import (
    NO_TEMPLATE,
    AllowedChoice,
    AnswerFormat,
    FunctionTool,
    Mode,
    NamedChoice,
    OtherChoice,
    OtherThanFunction,
    RenderingBody,
    Turn,
    conversation,
    tool_of,
    tool_use,
)
from worker_node.tasks.generate.http.ollama import keeping
from worker_node.tasks.generate.http.parameters import SAMPLING, Length, SamplingFields, StreamOptions
from worker_node.tasks.generate.http.replies import (
    ParsedRequest,
    Renderer,
    chat_logprobs,
    completion_logprobs,
    generation_route,
    known_alternatives,
)
from worker_node.tasks.generate.request import GenerationRequest, TokenIds, ToolUse
from worker_node.tasks.generate.service import Choices

MAX_GENERATIONS = 128

Json = dict[str, Any]


class _Rendered(Renderer):
    """The object around the choices, with one id and one time for a whole reply."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, body: ChatBody | CompletionsBody, top_logprobs: int, choices: Choices) -> None:
        options = body.stream_options or StreamOptions()
        self._choices = choices
        self._choices_per_prompt, self._returned = body.generations, body.n or 1
        self._top = top_logprobs
        # A completion may ask for the chosen tokens alone, by 0.
        self._logprobs = body.logprobs is not None and body.logprobs is not False
        self._with_ids = bool(body.return_token_ids)
        self._with_usage = bool(options.include_usage)
        self._usage_in_chunks = bool(options.include_usage and options.continuous_usage_stats)
        self._fields = {
            "id": f"{self.id_prefix}{token_hex(12)}",
            "created": int(time.time()),
            "model": choices.model,
        }
        # The JSON around the choice is the same in every chunk but the last.
        self._head = b"data: " + orjson.dumps(self._object(self.chunk_kind, []))[:-2]
        self._tail = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"
        self._ends: list[Finished] = []

    def event(self, event: Event, choice: int, tokens: int, /) -> bytes:
        part = self._part(choice, event)
        if isinstance(event, Finished):
            self._ends.append(event)
        if len(self._ends) < len(self._choices.runs):
            return b"" if part is None else self._chunk(part, tokens)
        busy = busy_fields(busy_of([end.busy for end in self._ends]))
        frames = b"" if part is None else self._chunk(part, tokens, busy)
        if self._with_usage:
            frames += event_frame(self._object(self.chunk_kind, []) | {"usage": self._usage(self._ends)} | busy)
        return frames + b"data: [DONE]\n\n"

    def failure(self, error: NodeError) -> bytes:
        """There is no `[DONE]` after it."""
        return event_frame({"error": describe_error(error)})

    def whole(self, ends: Sequence[Finished]) -> Json:
        choices = []
        for index, best in enumerate(_best(ends, self._choices_per_prompt, self._returned)):
            choice = self._choice(index, ends[best])
            choices.append(choice | {"token_ids": ends[best].token_ids} if self._with_ids else choice)
        return self._object(self.kind, choices) | {"usage": self._usage(ends)}

    @abstractmethod
    def _part(self, index: int, event: Event) -> Json | None:
        """What a chunk says of a choice; None for no chunk."""

    @abstractmethod
    def _choice(self, index: int, finished: Finished) -> Json:
        """A choice of a whole reply."""

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return self._fields | {"object": kind, "choices": choices}

    def _chunk(self, part: Json, tokens: int, busy: Json | None = None) -> bytes:
        if not busy and not self._usage_in_chunks:
            return self._head + orjson.dumps(part) + self._tail
        body = self._object(self.chunk_kind, [part])
        if self._with_usage:
            prompt = self._choices.runs[part["index"]].execution.route.token_count
            body["usage"] = _token_usage(prompt, tokens) if self._usage_in_chunks else None
        return event_frame(body | (busy or {}))

    def _usage(self, finished: Sequence[Finished]) -> Json:
        # A prompt counts once for all of its choices, as the engine counted it: before, images are an estimate.
        prompt = sum(end.usage.prompt_tokens for end in finished) // self._choices_per_prompt
        usage = _token_usage(prompt, sum(end.usage.completion_tokens for end in finished))
        cached = [end.usage.cached_tokens for end in finished]
        known = [tokens for tokens in cached if tokens is not None]
        if len(known) < len(cached):
            return usage
        # Of several choices the first is computed, and the others find it in the cache.
        firsts = range(0, len(known), self._choices_per_prompt)
        tokens = sum(min(known[first : first + self._choices_per_prompt]) for first in firsts)
        return usage | {"prompt_tokens_details": {"cached_tokens": tokens}}


def _best(ends: Sequence[Finished], per_prompt: int, count: int) -> Iterator[int]:
    """Those to return for each prompt: the likeliest ones by token, as OpenAI ranks them."""
    for first in range(0, len(ends), per_prompt):
        group = range(first, first + per_prompt)
        yield from sorted(group, key=lambda one: -ends[one].mean_logprob)[:count] if per_prompt > count else group


def _token_usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _parsed(
    request: web.Request,
    body: SamplingFields,
    requests: list[GenerationRequest],
    renderer: Callable[[Choices], Renderer],
) -> ParsedRequest:
    kept = nullcontext() if body.keep_alive is None else keeping(request, body.model, body.keep_alive)
    return ParsedRequest(requests, renderer, bool(body.stream), kept)


# Chat.


class ChatBody(SamplingFields, RenderingBody):
    rules: ClassVar[Table] = {
        **SAMPLING,
        "add_special_tokens": Unsupported("the chat template writes the special tokens"),
        "audio": Unsupported("audio is not supported"),
        "chat_template": Unsupported(NO_TEMPLATE),
        "documents": Unsupported("the templates here take no documents; write them into a message"),
        "echo": Unsupported("a conversation is not sent back"),
        "function_call": Unsupported("this is the form before 2023-11; use tool_choice", ("auto", "none")),
        "functions": Unsupported("this is the form before 2023-11; use tools"),
        "plugins": Unsupported("this node has no plug-ins"),
        "web_search_options": Unsupported("this node searches nothing; offer a tool that does"),
    }
    takes_images: ClassVar[bool] = True

    messages: Annotated[list[Annotated[Turn, Field(discriminator="role")]], Field(min_length=1)]
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: AnswerFormat | None = None
    tools: list[FunctionTool | OtherThanFunction] | None = None
    tool_choice: Mode | NamedChoice | AllowedChoice | OtherChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None

    def requests(self, context: RequestContext) -> list[GenerationRequest]:
        """One domain request for each choice. Raises BadRequest."""
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest.at("top_logprobs", "only with logprobs: true")
        if self.modalities is not None and self.modalities != ["text"]:
            raise BadRequest('modalities: must be ["text"]; nothing else is supported', param="modalities")
        form, use = self.response_format, self._tool_use()
        ignored = [f"tools.{tool.type}" for tool in self.tools or [] if not isinstance(tool, FunctionTool)]
        return self.requests_for(
            context,
            conversation(self.messages),
            logprobs=bool(self.logprobs),
            form=form.schema_of_answer("response_format", "json_schema") if form else None,
            tool_use=use,
            ignored=ignored,
            split_reasoning=True,
            rendering=self.rendering(),
        )

    def _tool_use(self) -> ToolUse | None:
        if self.tools is None and self.tool_choice is None:
            return None
        tools = []
        for index, tool in enumerate(self.tools or []):
            if isinstance(tool, FunctionTool):
                tools.append(tool_of(tool.function, f"tools[{index}].function"))
        single = self.parallel_tool_calls is False
        match self.tool_choice:
            case NamedChoice(function=function):
                return tool_use(tools, "required", [function.name], single=single)
            case AllowedChoice(allowed_tools=allowed):
                names = [tool.function.name for tool in allowed.tools if isinstance(tool, NamedChoice)]
                return tool_use(tools, allowed.mode, names, single=single)
            case mode:
                return tool_use(tools, mode, single=single)


async def _chat(request: web.Request, context: RequestContext, body: ChatBody) -> ParsedRequest:
    wanted = body.top_logprobs
    top = known_alternatives(request, "top_logprobs", wanted, body.temperature) if wanted else 0
    return _parsed(request, body, body.requests(context), partial(_Chat, body, top))


class _Chat(_Rendered):
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def opening(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(_delta(index, first), 0) for index in range(len(self._choices.runs)))

    def _part(self, index: int, event: Event) -> Json | None:
        match event:
            case Finished():
                return _delta(index, {}, event.finish_reason)
            case Opened(block) if block.kind is BlockKind.CALL:
                return _delta(index, {"tool_calls": [{"index": block.call, **_call(block, "")}]})
            case Grown(block, text, logprobs):
                match block.kind:
                    case BlockKind.CALL:
                        return _delta(index, {"tool_calls": [{"index": block.call, "function": {"arguments": text}}]})
                    case BlockKind.REASONING:
                        return _delta(index, {"reasoning_content": text})
                part = _delta(index, {"content": text})
                return part | {"logprobs": chat_logprobs(logprobs, self._top)} if logprobs else part
        return None

    def _choice(self, index: int, finished: Finished) -> Json:
        text, reasoning, calls = finished.text(), finished.text(BlockKind.REASONING), finished.calls
        # With calls and no words there is no content, not an empty one.
        message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_call(block, block.text) for block in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(finished.logprobs, self._top) if self._logprobs else None,
            "finish_reason": finished.finish_reason,
        }


def _call(block: Block, arguments: str) -> Json:
    return {"id": f"call_{block.id}", "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _delta(index: int, delta: Json, finish: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


class ChatChoice(Reply):
    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage


# Completions.

Ids = Annotated[list[int], Field(min_length=1)]


class CompletionsBody(SamplingFields):
    rules: ClassVar[Table] = {
        **SAMPLING,
        "add_special_tokens": Unsupported("send token ids for a prompt without special tokens", (True,)),
        "echo": Unsupported("a prompt is not sent back; put it before the text"),
        "response_format": Unsupported("use /v1/chat/completions", ({"type": "text"},)),
        "suffix": Unsupported("text cannot be filled in before a suffix: the models here only continue a prompt"),
    }
    # What OpenAI does, and what its clients count on.
    default_length: ClassVar[int | None] = 16

    prompt: str | Annotated[list[str], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
    # 0 is refused with what to do.
    max_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def requests(self, context: RequestContext) -> list[GenerationRequest]:
        """One domain request for each choice, those of a prompt together. Raises BadRequest."""
        if self.max_tokens == 0:
            raise BadRequest.at("max_tokens", "must be 1 or more, got 0; /tokenize counts the tokens of a prompt")
        # A single prompt need not be in a list.
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        given: Any = [self.prompt] if single else self.prompt
        prompts = [one if isinstance(one, str) else TokenIds(tuple(one)) for one in given]
        if len(prompts) * self.generations > MAX_GENERATIONS:
            raise BadRequest(
                f"{len(prompts)} prompts of {self.generations} choices; a request may have {MAX_GENERATIONS} in all",
                param="prompt",
            )
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            requests += self.requests_for(context, prompt, logprobs=self.logprobs is not None)
        return requests


async def _completions(request: web.Request, context: RequestContext, body: CompletionsBody) -> ParsedRequest:
    wanted = body.logprobs
    top = known_alternatives(request, "logprobs", wanted, body.temperature) if wanted else 0
    return _parsed(request, body, body.requests(context), partial(_Completion, body, top))


class _Completion(_Rendered):
    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, body: CompletionsBody, top_logprobs: int, choices: Choices) -> None:
        super().__init__(body, top_logprobs, choices)
        self._offsets: dict[int, int] = {}

    def _part(self, index: int, event: Event) -> Json | None:
        match event:
            case Finished():
                return _text_choice(index, "", finish=event.finish_reason)
            case Grown(_, text, logprobs):
                if not logprobs:
                    return _text_choice(index, text)
                offset = self._offsets.get(index, 0)
                self._offsets[index] = offset + sum(len(token.text) for token in logprobs)
                return _text_choice(index, text, completion_logprobs(logprobs, self._top, offset))
        return None

    def _choice(self, index: int, finished: Finished) -> Json:
        logprobs = completion_logprobs(finished.logprobs, self._top) if self._logprobs else None
        return _text_choice(index, finished.text(), logprobs, finished.finish_reason)


def _text_choice(index: int, text: str, logprobs: Json | None = None, finish: str | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class TextChoice(Reply):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None


class Completion(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: OpenAIUsage


OPERATIONS = (
    generation_route("/v1/completions", _completions, "OpenAI: continue text", Completion, CompletionsBody),
    generation_route("/v1/chat/completions", _chat, "OpenAI: answer a conversation", ChatCompletion, ChatBody),
)
