"""POST /v1/chat/completions: answer a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from aiohttp import web
from pydantic import Field

from worker_node.api import parameters
from worker_node.api.body import read_body
from worker_node.api.context import request_context
from worker_node.api.keys import NODE
from worker_node.api.middleware import inference
from worker_node.api.openai.fields import NumberOf, SamplingFields
from worker_node.api.openai.messages import ChatMessage, domain_message
from worker_node.api.openai.reply import Envelope, busy_time, collect, json_response, new_id, usage
from worker_node.api.openai.stream import stream_chunks
from worker_node.domain import Finished, GenerationRequest, RequestContext, Token
from worker_node.serving.choices import generate_choices, repeated


class ChatBody(SamplingFields):
    """Body of POST /v1/chat/completions."""

    refused: ClassVar[Mapping[str, str]] = {
        "logit_bias": "single tokens cannot be favoured or forbidden by this engine",
        "store": "answers are not stored here",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: NumberOf | None = None

    def requests(self, context: RequestContext) -> list[GenerationRequest]:
        """One domain request for each choice."""
        messages = tuple(domain_message(message) for message in self.messages)
        sampling = parameters.sampling(parameters.OPENAI, self.model_dump(exclude={"messages"}))
        return repeated(GenerationRequest(context, messages, sampling, self.model), self.n or 1)


class _Chunks:
    """See `ChunkRenderer`."""

    kind = "chat.completion.chunk"

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [_delta(index, {"role": "assistant", "content": ""})]

    def token(self, index: int, token: Token) -> list[dict[str, Any]]:
        return [_delta(index, {"content": token.text})]

    def closing(self, index: int, finished: Finished) -> list[dict[str, Any]]:
        return [_delta(index, {}, finished.finish_reason)]


def _delta(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [web.post("/v1/chat/completions", inference(_chat))]


async def _chat(request: web.Request) -> web.StreamResponse:
    node = request.app[NODE]
    context = request_context(request)
    body = await read_body(request, ChatBody)
    async with generate_choices(node.registry, body.requests(context)) as choices:
        envelope = Envelope(new_id("chatcmpl-"), choices.routes[0].model)
        if body.stream:
            return await stream_chunks(
                request,
                choices,
                envelope,
                _Chunks(),
                include_usage=body.include_usage,
                choices_per_prompt=len(choices.routes),
            )
        outcomes = await collect(choices)
    ends = [end for _, end in outcomes]
    reply = envelope.wrap(
        "chat.completion",
        [
            {
                "index": index,
                "message": {"role": "assistant", "content": outcome.text, "refusal": None},
                "logprobs": None,
                "finish_reason": end.finish_reason,
            }
            for index, (outcome, end) in enumerate(outcomes)
        ],
    )
    reply["usage"] = usage(ends, choices.routes, len(choices.routes))
    return json_response(reply, choices.routes[0], busy_time(ends))
