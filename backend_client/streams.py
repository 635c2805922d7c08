"""Replies to chats and prompts as typed results, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Generic, Self, TypeVar

from pydantic import BaseModel, ValidationError

from backend_client.errors import InvalidAnswer
from backend_client.http.answers import choices_in
from backend_client.http.stream_forms import CHAT, INFERENCE, EventStream, StreamEvent
from backend_client.lifetime import STARTED, OneLoop, end_now, owning
from backend_client.results import (
    ChatDelta,
    ChatResult,
    GenerateResult,
    RawReply,
    Timing,
    ToolCallDelta,
    origin_fields,
)

ChatItems = AsyncGenerator[ChatDelta | ChatResult, None]
Answer = AsyncGenerator[str | GenerateResult, None]
"""Pieces of text, as they come; the result is the last item."""

M = TypeVar("M", bound=BaseModel)
_INCOMPLETE = {
    "length": "it was cut: increase max_tokens",
    "model_length": "it was cut where the model's context ends",
    "content_filter": "it was filtered",
}


def chat_result(reply: RawReply, schema: type[BaseModel] | None) -> ChatResult:
    """Raises InvalidAnswer for an answer that does not match `schema`, or is not complete."""
    choices = choices_in(reply.body)
    result = ChatResult(choices=choices, usage=reply.usage, **origin_fields(reply))
    return result if schema is None else replace(result, parsed=validated(schema, result))


def validated(model: type[M], result: ChatResult) -> M | None:
    """The answer as an object of the model; None where it calls tools. Raises InvalidAnswer.

    Also for one that was cut or filtered: as in OpenAI's SDK it is not an answer even if it happens to match.
    """
    incomplete = next((hint for each in result.choices if (hint := _INCOMPLETE.get(each.finish_reason))), None)
    if incomplete is not None:
        raise invalid_answer(model, result, incomplete)
    if result.tool_calls or result.finish_reason == "tool_calls":
        return None
    try:
        return model.model_validate_json(result.text)
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False, include_context=False)
    # Raised outside of the handler: that error holds the text.
    where = sorted({".".join(map(str, problem["loc"])) or "the whole" for problem in problems})[:5]
    raise invalid_answer(model, result, f"wrong: {', '.join(where)}")


def invalid_answer(model: type[BaseModel], result: ChatResult, why: str) -> InvalidAnswer:
    """The error for an answer that is not an object of the model; it holds the text."""
    cut = next((each.finish_reason for each in result.choices if each.finish_reason in _INCOMPLETE), None)
    return InvalidAnswer(
        f"the answer of {result.model} is not a valid {model.__name__}; {why}",
        text=result.text,
        finish_reason=cut or result.finish_reason,
        attempts=result.attempts,
        request_id=result.request_id,
    )


@owning
async def chat_items(events: EventStream, schema: type[BaseModel] | None) -> ChatItems:
    """The deltas of a streamed chat, and its result. Raises what the stream raises, and as `chat_result`."""
    seen: list[StreamEvent] = []
    try:
        yield STARTED
        async for item in events:
            if isinstance(item, StreamEvent):
                seen.append(item)
                for delta in _deltas(item.data or {}):
                    yield delta
                continue
            yield chat_result(replace(item, body=CHAT.whole(seen)), schema)
    finally:
        await events.aclose()


def generate_result(reply: RawReply) -> GenerateResult:
    """The reply of /inference."""
    body = reply.body
    times = body.get("timing_ms") or {}
    timing = Timing(**{part.name: times.get(part.name) for part in fields(Timing)})
    return GenerateResult(
        text=body["text"],
        finish_reason=body["finish_reason"],
        usage=reply.usage,
        timing=timing,
        **origin_fields(reply),
    )


@owning
async def generate_items(events: EventStream) -> Answer:
    """The pieces of a streamed answer of /inference, and its result. Raises what the stream raises."""
    seen: list[StreamEvent] = []
    try:
        yield STARTED
        async for item in events:
            if isinstance(item, RawReply):
                yield generate_result(replace(item, body=INFERENCE.whole(seen)))
                continue
            seen.append(item)
            if item.text:
                yield item.text
    finally:
        await events.aclose()


def _deltas(data: Mapping[str, Any]) -> Iterator[ChatDelta]:
    """The deltas of an event, whose parts were checked when it was read."""
    for choice in data.get("choices") or ():
        delta = choice.get("delta") or {}
        found = ChatDelta(
            text=delta.get("content") or "",
            tool_calls=tuple(map(_call_delta, delta.get("tool_calls") or ())),
            reasoning=delta.get("reasoning_content") or "",
            choice=choice.get("index") or 0,
        )
        if found.text or found.tool_calls or found.reasoning:
            yield found


def _call_delta(call: Mapping[str, Any]) -> ToolCallDelta:
    function = call.get("function") or {}
    return ToolCallDelta(call.get("index") or 0, call.get("id"), function.get("name"), function.get("arguments") or "")


I = TypeVar("I")  # noqa: E741  (an item of a stream)
P = TypeVar("P")
R = TypeVar("R")


class ResultStream(Generic[P, R]):
    """Iterate over it for the pieces; `result` is there after the last one.

    Nothing is sent before the first piece is asked for. Leaving the loop early, or `aclose`, stops the node's work.
    `async with` closes for sure, also when the loop is left by an exception.

    Several tasks of one event loop may iterate over it: each piece goes to one of them. `aclose` in one task ends the
    iteration in the others.
    """

    _result_type: type[R]

    def __init__(self, open_answer: Callable[[], Awaitable[AsyncGenerator[P | R, None]]]) -> None:
        self._items = OneLoop(_answer(open_answer))
        # An async generator allows only one reader at a time.
        self._turn = asyncio.Lock()
        self._reading: asyncio.Timeout | None = None
        self._closed = False
        self.result: R | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> P:
        # In a forked child the turn may be the parent's for good.
        self._items.check()
        async with self._turn:
            if not self._closed:
                try:
                    async with asyncio.timeout(None) as self._reading:
                        async for item in self._items:
                            if not isinstance(item, self._result_type):
                                return item  # type: ignore[return-value]  # all others are pieces
                            self.result = item
                except TimeoutError:
                    if not self._closed:
                        raise
                finally:
                    self._reading = None
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._closed = True
        if self._reading is not None:
            end_now(self._reading)
        async with self._turn:
            await self._items.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class TokenStream(ResultStream[str, GenerateResult]):
    """A streamed generation: pieces of text, then the result. See `ResultStream`."""

    _result_type = GenerateResult


class ChatStream(ResultStream[ChatDelta, ChatResult]):
    """A streamed chat: deltas of text and tool calls, then the result. See `ResultStream`."""

    _result_type = ChatResult


async def _answer(open_answer: Callable[[], Awaitable[AsyncGenerator[I, None]]]) -> AsyncGenerator[I, None]:
    answer = await open_answer()
    try:
        async for item in answer:
            yield item
    finally:
        await answer.aclose()
