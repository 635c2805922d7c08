"""Closes resources in an event loop before that loop ends, even if nobody closes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


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
