"""What belongs to one event loop: closed before that loop ends, even if nobody closes it, and of no use in another."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from backend_client.errors import ConfigurationError

T = TypeVar("T")


def before_loop_ends(close: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    """Await `close` when the tasks of the running loop are cancelled, as `asyncio.run` does at its end.

    Cancel the returned task when that has been done otherwise; `close` is awaited then, too.
    """

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await close()

    return asyncio.create_task(wait(), name=name)


class OneLoop(AsyncGenerator[T, None]):
    """An async generator that is read in the process and the event loop that began to read it.

    asyncio ends the generators of a loop that ends: read in the next loop, what is left would be missing. In a forked
    child they hold the parent's connections.
    """

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._begun: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._ended = False

    def check(self) -> None:
        """Raise ConfigurationError where it was begun elsewhere and has not ended."""
        if not self._ended and self._elsewhere:
            forked = self._begun is not None and self._begun[0] != os.getpid()
            where = "in the parent of this process" if forked else "in another event loop"
            raise ConfigurationError(f"this stream was begun {where} and cannot be continued here; begin a new one")

    @property
    def _elsewhere(self) -> bool:
        return self._begun is not None and self._begun != (os.getpid(), asyncio.get_running_loop())

    async def asend(self, _: None) -> T:
        """The next item. Raises ConfigurationError, see `check`."""
        self.check()
        self._begun = os.getpid(), asyncio.get_running_loop()
        try:
            return await anext(self._items)
        except StopAsyncIteration:
            self._ended = True
            raise

    async def athrow(self, *error: Any) -> T:
        """See AsyncGenerator."""
        return await self._items.athrow(*error)

    async def aclose(self) -> None:
        """Close it. What was begun elsewhere is not touched: its connections are used there."""
        if not self._elsewhere:
            await self._items.aclose()
        self._ended = True
