"""A streamed answer, as the caller sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from backend_client._protocol.jobs import Answer
from backend_client.results import GenerateResult


class TokenStream:
    """Iterate over it for the pieces of text; `result` is there after the last one.

    Nothing is sent before the first piece is asked for. Leaving the loop early, or `aclose`, stops the node's work.
    `async with` closes for sure, also when the loop is left by an exception.

    Several tasks may iterate over it: each piece goes to one of them. `aclose` in one task ends the iteration in the
    others.
    """

    def __init__(self, open_answer: Callable[[], Awaitable[Answer]]) -> None:
        self._items = _answer(open_answer)
        # An async generator allows only one reader at a time.
        self._turn = asyncio.Lock()
        self._reader: asyncio.Task[Any] | None = None
        self._closed = self._interrupted = False
        self.result: GenerateResult | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
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

    async def _read(self) -> str | None:
        """The next piece; None at the end, and when `aclose` interrupts."""
        self._reader = reader = asyncio.current_task()
        cancelled_before = reader.cancelling() if reader else 0
        try:
            async for item in self._items:
                if isinstance(item, str):
                    return item
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


async def _answer(open_answer: Callable[[], Awaitable[Answer]]) -> Answer:
    answer = await open_answer()
    try:
        async for item in answer:
            yield item
    finally:
        await answer.aclose()
