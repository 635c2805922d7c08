"""Replies to chats and prompts as typed results, whole and streamed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Generic, Self, TypeVar

from pydantic import BaseModel, ValidationError

from backend_client.errors import InvalidAnswer
from backend_client.http.answers import choices_in
from backend_client.http.stream_forms import CHAT, INFERENCE, EventStream, StreamEvent
from backend_client.lifetime import HomeLoop, end_now
from backend_client.results import (
    ChatDelta,
    ChatResult,
    GenerateResult,
    RawReply,
    Timing,
    ToolCallDelta,
    origin_fields,
)

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


def _deltas(data: Mapping[str, Any]) -> Iterator[ChatDelta]:
    """The deltas of an event, whose parts were checked when it was read."""
    for choice in data.get("choices") or ():
        delta = choice.get("delta") or {}
        found = ChatDelta(
            text=delta.get("content") or "",
            tool_calls=tuple(
                ToolCallDelta(
                    index=call.get("index") or 0,
                    id=call.get("id"),
                    name=(call.get("function") or {}).get("name"),
                    arguments=(call.get("function") or {}).get("arguments") or "",
                )
                for call in delta.get("tool_calls") or ()
            ),
            reasoning=delta.get("reasoning_content") or "",
            choice=choice.get("index") or 0,
        )
        if found.text or found.tool_calls or found.reasoning:
            yield found


P = TypeVar("P")
R = TypeVar("R")


class ResultStream(ABC, Generic[P, R]):
    """Iterate over it for the pieces; `result` is there after the last one.

    Nothing is sent before the first piece is asked for. Leaving the loop early, or `aclose`, stops the node's work.
    `async with` closes for sure, also when the loop is left by an exception.

    Several tasks of one event loop may iterate over it: each piece goes to one of them. `aclose` in one task ends the
    iteration in the others.
    """

    def __init__(self, open_events: Callable[[], Awaitable[EventStream]]) -> None:
        self._open = open_events
        self._events: EventStream | None = None
        self._home = HomeLoop()
        self._seen: list[StreamEvent] = []
        self._reply: RawReply | None = None
        self._pieces: deque[P] = deque()
        # An async generator allows only one reader at a time.
        self._turn = asyncio.Lock()
        self._reading: asyncio.Timeout | None = None
        self._ended = False
        self._closed = False
        self.result: R | None = None

    @abstractmethod
    def _pieces_of(self, event: StreamEvent) -> Iterable[P]:
        """What callers get of an event."""

    @abstractmethod
    def _result_of(self, reply: RawReply, events: Sequence[StreamEvent]) -> R:
        """The result, from who answered and all events."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> P:
        # In a forked child the turn may be the parent's for good.
        if not self._ended:
            self._home.enter()
        async with self._turn:
            try:
                async with asyncio.timeout(None) as self._reading:
                    while not (self._pieces or self._ended):
                        await self._read()
            except TimeoutError:
                if not self._closed:
                    raise
            finally:
                self._reading = None
            if self._pieces and not self._closed:
                return self._pieces.popleft()
        raise StopAsyncIteration

    async def _read(self) -> None:
        try:
            if self._events is None:
                self._events = await self._open()
            item = await anext(self._events, None)
            if isinstance(item, StreamEvent):
                self._seen.append(item)
                self._pieces.extend(self._pieces_of(item))
                return
            if item is not None:
                self._reply = item
                return
            self._ended = True
            if self._reply is not None:
                self.result = self._result_of(self._reply, self._seen)
        except BaseException:
            self._ended = True
            raise

    async def aclose(self) -> None:
        self._closed = self._ended = True
        if self._reading is not None:
            end_now(self._reading)
        # What was begun elsewhere is not touched: its connections are used there.
        if not self._home.elsewhere:
            async with self._turn:
                if self._events is not None:
                    await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class TokenStream(ResultStream[str, GenerateResult]):
    """A streamed generation: pieces of text, then the result. See `ResultStream`."""

    def _pieces_of(self, event: StreamEvent) -> Iterable[str]:
        return (event.text,) if event.text else ()

    def _result_of(self, reply: RawReply, events: Sequence[StreamEvent]) -> GenerateResult:
        return generate_result(replace(reply, body=INFERENCE.whole(events)))


class ChatStream(ResultStream[ChatDelta, ChatResult]):
    """A streamed chat: deltas of text and tool calls, then the result. See `ResultStream`."""

    def __init__(
        self, open_events: Callable[[], Awaitable[EventStream]], schema: type[BaseModel] | None = None
    ) -> None:
        super().__init__(open_events)
        self._schema = schema

    def _pieces_of(self, event: StreamEvent) -> Iterable[ChatDelta]:
        return _deltas(event.data or {})

    def _result_of(self, reply: RawReply, events: Sequence[StreamEvent]) -> ChatResult:
        return chat_result(replace(reply, body=CHAT.whole(events)), self._schema)
