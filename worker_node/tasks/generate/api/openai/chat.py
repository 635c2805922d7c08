"""POST /v1/chat/completions: answer a conversation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from aiohttp import web
from pydantic import Field

from worker_node.api import parameters
from worker_node.api.body import limited, read_body
from worker_node.api.context import request_context
from worker_node.api.keep_alive import keeping
from worker_node.api.keys import NODE
from worker_node.api.leniency import Table
from worker_node.api.middleware import inference
from worker_node.core.errors import BadRequest
from worker_node.core.types import RequestContext, ToolUse
from worker_node.tasks.generate.api.openai.chat_chunks import ChatChunks, whole_message
from worker_node.tasks.generate.api.openai.fields import NumberOf, SamplingFields
from worker_node.tasks.generate.api.openai.logprobs import chat_logprobs, known_alternatives
from worker_node.tasks.generate.api.openai.messages import ChatMessage, conversation
from worker_node.tasks.generate.api.openai.reply import Envelope, collect, json_response, new_id, usage
from worker_node.tasks.generate.api.openai.stream import stream_chunks
from worker_node.tasks.generate.api.openai.table import CHAT
from worker_node.tasks.generate.api.openai.template import rendering
from worker_node.tasks.generate.api.openai.tools import (
    MAX_TOOLS,
    AllowedChoice,
    Choice,
    NamedChoice,
    OfferedTool,
    ResponseFormat,
    Wanted,
    domain_tools,
    schema_of,
    tool_use,
)
from worker_node.tasks.generate.serving.choices import generate_choices, repeated
from worker_node.tasks.generate.serving.requests import GenerationRequest


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
