"""Several coroutines as one: the first failure cancels the others and is raised as it is, not in a group."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

R = TypeVar("R")


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of them. Raises the first error; none of them runs on after this returns."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        if tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait until they have ended."""
    ended = list(tasks)
    for task in ended:
        task.cancel()
    # Also of those that had ended: asyncio logs errors that nobody looked at.
    await asyncio.gather(*ended, return_exceptions=True)


async def uninterrupted(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine to its end, however often the caller is cancelled meanwhile; it is raised only then."""
    task = asyncio.create_task(coroutine)
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # it has been looked at: nothing is logged
    raise interruption
