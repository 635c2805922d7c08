"""A chat answer in chunks, and as a whole message."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from aiohttp import web
from pydantic import Field

from worker_node.core.errors import BadRequest
from worker_node.core.types import Finished, Piece, Reasoning, RequestContext, Token, ToolCallStarted, ToolUse
from worker_node.http import parameters
from worker_node.http.body import limited, read_body
from worker_node.http.context import request_context
from worker_node.http.leniency import NODE, Table
from worker_node.http.middleware import inference
from worker_node.http.ollama import keeping
from worker_node.tasks.generate.http.conversation import (
    MAX_TOOLS,
    AllowedChoice,
    ChatMessage,
    Choice,
    NamedChoice,
    OfferedTool,
    ResponseFormat,
    Wanted,
    conversation,
    domain_tools,
    schema_of,
    tool_use,
)
from worker_node.tasks.generate.http.fields import CHAT, NumberOf, SamplingFields, rendering
from worker_node.tasks.generate.http.stream import (
    Envelope,
    WholeAnswer,
    chat_logprobs,
    collect,
    json_response,
    known_alternatives,
    new_id,
    stream_chunks,
    usage,
)
from worker_node.tasks.generate.model import GenerationRequest
from worker_node.tasks.generate.service import generate_choices, repeated


class ChatChunks:
    """See `ChunkRenderer`."""

    kind = "chat.completion.chunk"

    def __init__(self, top_logprobs: int) -> None:
        self._top = top_logprobs

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The first chunk of a choice."""
        return [_chunk(index, {"role": "assistant", "content": ""})]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a choice."""
        if isinstance(piece, Token):
            part = _chunk(index, {"content": piece.text})
            if piece.logprobs:
                part["logprobs"] = chat_logprobs(piece.logprobs, self._top)
            return [part]
        if isinstance(piece, Reasoning):
            return [_chunk(index, {"reasoning_content": piece.text})]
        call: dict[str, Any] = {"index": piece.call}
        if isinstance(piece, ToolCallStarted):
            call |= {"id": new_id("call_"), "type": "function", "function": {"name": piece.name, "arguments": ""}}
        else:
            call["function"] = {"arguments": piece.text}
        return [_chunk(index, {"tool_calls": [call]})]

    def closing(self, index: int, finished: Finished) -> list[dict[str, Any]]:
        """The last chunk of a choice."""
        return [_chunk(index, {}, finished.finish_reason)]


def whole_message(outcome: WholeAnswer) -> dict[str, Any]:
    """The message of a finished choice."""
    message: dict[str, Any] = {
        "role": "assistant",
        # With calls and no words there is no content, not an empty one.
        "content": None if outcome.calls and not outcome.text.strip() else outcome.text,
        "refusal": None,
    }
    if outcome.reasoning:
        message["reasoning_content"] = outcome.reasoning
    if outcome.calls:
        message["tool_calls"] = [
            {"id": new_id("call_"), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in outcome.calls
        ]
    return message


def _chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


# POST /v1/chat/completions: answer a conversation.


class ChatBody(SamplingFields):
    """Body of POST /v1/chat/completions."""

    rules: ClassVar[Table] = CHAT
    takes_images: ClassVar[bool] = True

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: NumberOf | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)] | None = None
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
            raise BadRequest("modalities: text is the only one", param="modalities")
        given = self.model_dump(exclude={"messages", "tools", "logprobs"})
        request = GenerationRequest(
            self.urgency(context),
            conversation(self.messages),
            parameters.sampling(parameters.OPENAI, given, logprobs=bool(self.logprobs)),
            self.model,
            tool_use=self._tool_use(),
            grammar=self.held_to(schema_of(self.response_format)),
            split_reasoning=True,
            context_limit=self.num_ctx,
            rendering=rendering(
                self.chat_template_kwargs,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
            ),
            keep_last=self.keep_last,
        )
        return repeated(request, self.n or 1)

    def _tool_use(self) -> ToolUse | None:
        if isinstance(self.tool_choice, NamedChoice):
            wanted = Wanted((self.tool_choice.function.name,), forced=True)
        elif isinstance(self.tool_choice, AllowedChoice):
            allowed = self.tool_choice.allowed_tools
            wanted = Wanted(tuple(tool.function.name for tool in allowed.tools), forced=allowed.mode == "required")
        else:
            wanted = Wanted.of(self.tool_choice)
        return tool_use(domain_tools(self.tools or []), wanted, single=self.parallel_tool_calls is False)


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [web.post("/v1/chat/completions", inference(_chat))]


async def _chat(request: web.Request) -> web.StreamResponse:
    node = request.app[NODE]
    context = request_context(request)
    body = await read_body(request, ChatBody)
    top = limited(request, "top_logprobs", body.top_logprobs or 0, known_alternatives(body.temperature))
    async with (
        keeping(request, body.model, body.keep_alive),
        generate_choices(node.services, body.requests(context), whole=not body.stream) as choices,
    ):
        envelope = Envelope(new_id("chatcmpl-"), choices.routes[0].model)
        if body.stream:
            return await stream_chunks(
                request,
                choices,
                envelope,
                ChatChunks(top),
                usage_of=body.usage_of_chunks,
                choices_per_prompt=len(choices.routes),
            )
        outcomes = await collect(choices)
    ends = [end for _, end in outcomes]
    parts: list[dict[str, Any]] = [
        {
            "index": index,
            "message": whole_message(outcome),
            "logprobs": chat_logprobs(outcome.logprobs, top) if body.logprobs else None,
            "finish_reason": end.finish_reason,
        }
        for index, (outcome, end) in enumerate(outcomes)
    ]
    reply = envelope.wrap("chat.completion", parts)
    reply["usage"] = usage(ends, len(choices.routes))
    return json_response(reply, choices.routes[0], ends)
