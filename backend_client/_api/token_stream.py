"""Streamed answers, as the caller sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from backend_client._api.chat_reply import ChatItems
from backend_client._protocol.jobs import Answer
from backend_client._resilience.loop_end import OneLoop
from backend_client.results import ChatDelta, ChatResult, GenerateResult

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

    def __init__(self, open_answer: Callable[[], Awaitable[AsyncGenerator[P | R, None]]], result: type[R]) -> None:
        self._items = OneLoop(_answer(open_answer))
        self._result_type = result
        # An async generator allows only one reader at a time.
        self._turn = asyncio.Lock()
        self._reader: asyncio.Task[Any] | None = None
        self._closed = self._interrupted = False
        self.result: R | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> P:
        # In a forked child the turn may be the parent's for good.
        self._items.check()
        async with self._turn:
            if not self._closed:
                piece = await self._read()
                if piece is not None:
                    return piece
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop the answer."""
        if not self._closed and self._reader is not None:
            self._interrupted = self._reader.cancel()
        self._closed = True
        async with self._turn:
            await self._items.aclose()

    async def _read(self) -> P | None:
        """The next piece; None at the end, and when `aclose` interrupts."""
        self._reader = reader = asyncio.current_task()
        cancelled_before = reader.cancelling() if reader else 0
        try:
            async for item in self._items:
                if not isinstance(item, self._result_type):
                    return item  # type: ignore[return-value]  # all others are pieces
                self.result = item
        except asyncio.CancelledError:
            # As in asyncio.timeout: only the cancellation that `aclose` requested ends here.
            if not self._interrupted or reader is None or reader.cancelling() > cancelled_before + 1:
                raise
        finally:
            self._reader = None
            if self._interrupted and reader is not None:
                reader.uncancel()
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class TokenStream(ResultStream[str, GenerateResult]):
    """A streamed generation: pieces of text, then the result. See `ResultStream`."""

    def __init__(self, open_answer: Callable[[], Awaitable[Answer]]) -> None:
        super().__init__(open_answer, GenerateResult)


class ChatStream(ResultStream[ChatDelta, ChatResult]):
    """A streamed chat: deltas of text and tool calls, then the result. See `ResultStream`."""

    def __init__(self, open_answer: Callable[[], Awaitable[ChatItems]]) -> None:
        super().__init__(open_answer, ChatResult)


async def _answer(open_answer: Callable[[], Awaitable[AsyncGenerator[I, None]]]) -> AsyncGenerator[I, None]:
    answer = await open_answer()
    try:
        async for item in answer:
            yield item
    finally:
        await answer.aclose()
