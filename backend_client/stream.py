"""A streamed answer, as the caller sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from backend_client.jobs import Answer
from backend_client.results import GenerateResult


class TokenStream:
    """Iterate over it for the pieces of text; `result` is there after the last one.

    Nothing is sent before the first piece is asked for. Leaving the loop early, or `aclose`, tells the node to stop.
    `async with` closes for sure, also when the loop is left by an exception.
    """

    def __init__(self, open_answer: Callable[[], Awaitable[Answer]]) -> None:
        self._items = _answer(open_answer)
        self.result: GenerateResult | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        async for item in self._items:
            if isinstance(item, str):
                return item
            self.result = item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop the answer."""
        await self._items.aclose()

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
