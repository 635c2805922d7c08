"""Replies of OpenAI's dialect as typed results."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import fields
from typing import Any

from pydantic import BaseModel

from backend_client._api.schema import validated
from backend_client._protocol.dialect import FORMS, StreamEvent
from backend_client._protocol.jobs import EventStream
from backend_client.errors import BadReply
from backend_client.results import ChatChoice, ChatDelta, ChatResult, Origin, RawReply, ToolCall, ToolCallDelta

ChatItems = AsyncGenerator[ChatDelta | ChatResult, None]
_CHAT = FORMS["/v1/chat/completions"]


def origin_fields(reply: Origin) -> dict[str, Any]:
    """The fields of a result that say who answered, for another result."""
    return {field.name: getattr(reply, field.name) for field in fields(Origin)}


def chat_result(reply: RawReply, schema: type[BaseModel] | None) -> ChatResult:
    """Raises BadReply for what is no chat completion, InvalidAnswer for an answer that does not match `schema`."""
    choices = choices_in(reply.body)
    if choices is None:
        raise BadReply("the reply is not a chat completion", node=reply.node)
    result = ChatResult(choices=choices, usage=reply.usage, **origin_fields(reply))
    if schema is None or result.tool_calls:
        return result
    return ChatResult(choices=choices, usage=reply.usage, parsed=validated(schema, result), **origin_fields(reply))


def choices_in(body: Any) -> tuple[ChatChoice, ...] | None:
    """The choices of a chat completion; None if the reply is malformed."""
    with contextlib.suppress(TypeError, KeyError, AttributeError, ValueError):
        return tuple(_choice(choice) for choice in body["choices"]) or None
    return None


def _choice(choice: Mapping[str, Any]) -> ChatChoice:
    message = choice["message"]
    calls = tuple(_call(call) for call in message.get("tool_calls") or ())
    return ChatChoice(
        text=_text(message.get("content")),
        tool_calls=calls,
        finish_reason=_text(choice.get("finish_reason")),
        reasoning=_text(message.get("reasoning_content")),
        logprobs=choice.get("logprobs"),
        message={name: value for name, value in message.items() if value is not None or name == "content"},
    )


def _text(value: object) -> str:
    if not isinstance(value, str | None):
        raise TypeError
    return value or ""


def _call(call: Mapping[str, Any]) -> ToolCall:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not isinstance(name, str) or not name or not isinstance(arguments, str):
        raise TypeError
    # Not every server behind the cloud's API numbers its calls.
    return ToolCall(str(call.get("id") or ""), name, arguments)


async def chat_items(events: EventStream, schema: type[BaseModel] | None) -> ChatItems:
    """The deltas of a streamed chat, and its result. Raises what the stream raises, and as `chat_result`."""
    seen: list[StreamEvent] = []
    try:
        async for item in events:
            if isinstance(item, StreamEvent):
                seen.append(item)
                for delta in _deltas(item.data or {}):
                    yield delta
                continue
            body = None
            with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
                body = _CHAT.whole(seen)
            reply = RawReply(**{**{field.name: getattr(item, field.name) for field in fields(RawReply)}, "body": body})
            yield chat_result(reply, schema)
    finally:
        await events.aclose()


def _deltas(data: Mapping[str, Any]) -> Iterator[ChatDelta]:
    choices = data.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            continue
        text, reasoning = delta.get("content"), delta.get("reasoning_content")
        found = ChatDelta(
            text=text if isinstance(text, str) else "",
            tool_calls=tuple(_call_delta(call) for call in delta.get("tool_calls") or () if isinstance(call, dict)),
            reasoning=reasoning if isinstance(reasoning, str) else "",
            choice=choice.get("index") or 0,
        )
        if found.text or found.tool_calls or found.reasoning:
            yield found


def _call_delta(call: Mapping[str, Any]) -> ToolCallDelta:
    function = call.get("function") or {}
    return ToolCallDelta(call.get("index") or 0, call.get("id"), function.get("name"), function.get("arguments") or "")
