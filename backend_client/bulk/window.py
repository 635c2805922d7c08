"""How much of a slot a fragment takes: of small ones several share one, so that each need not wait for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from backend_client.bulk.inputs import BYTES_PER_ROW, Fragment

SLOT = 8
"""The parts of a slot."""

# So many rows and bytes are one chunk: what is in memory stays bounded.
_FEW_ROWS = 1024
_FEW_BYTES = 1024 * 1024
# Of compressed files, for one byte of the file.
_UNFOLDED = 8

Parts = Callable[[Fragment], int]


def whole(_: Fragment) -> int:
    """Every fragment takes a slot."""
    return SLOT


def shared_by_small(rows_per_fragment: int) -> Parts:
    """Fragments of at most one chunk and an eighth of the rows wanted take an eighth of a slot, others a whole one.

    So a process that dies never loses more than a full fragment of work for each slot.
    """
    most_rows = min(_FEW_ROWS, rows_per_fragment // SLOT)

    def parts(fragment: Fragment) -> int:
        file = fragment.file
        size = file.size if file.form == "parquet" else fragment.stop - fragment.start
        size *= _UNFOLDED if file.compression else 1
        rows = fragment.rows if fragment.rows is not None else size // BYTES_PER_ROW
        return 1 if rows <= most_rows and size <= _FEW_BYTES else SLOT

    return parts


# Several coroutines as one: the first failure cancels the others and is raised as it is, not in a group.

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
