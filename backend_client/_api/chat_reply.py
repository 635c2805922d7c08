"""Replies of OpenAI's dialect as typed results."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from pydantic import BaseModel

from backend_client._api.schema import validated
from backend_client._protocol.answers import choices_in
from backend_client._protocol.dialect import FORMS, StreamEvent
from backend_client._protocol.jobs import EventStream
from backend_client.results import ChatDelta, ChatResult, RawReply, ToolCallDelta
from backend_client.results.origin import origin_fields

ChatItems = AsyncGenerator[ChatDelta | ChatResult, None]
_CHAT = FORMS["/v1/chat/completions"]


def chat_result(reply: RawReply, schema: type[BaseModel] | None) -> ChatResult:
    """Raises InvalidAnswer for an answer that does not match `schema`, or is not complete."""
    choices = choices_in(reply.body)
    result = ChatResult(choices=choices, usage=reply.usage, **origin_fields(reply))
    return result if schema is None else replace(result, parsed=validated(schema, result))


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
