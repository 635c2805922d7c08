"""Background tasks that never end silently: one that fails or returns is logged and restarted with backoff."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
# A task that ran this long before it failed starts with the shortest pause again.
_STABLE_S = 30.0


def supervise(work: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    """Run `work` in a task until that task is cancelled.

    `work` is meant to run for ever. When it returns or raises, an error is logged and it is started again after
    0.1 s, doubling up to 5 s while it keeps failing.
    """
    return asyncio.create_task(_restarting(work, name), name=name)


async def _restarting(work: Callable[[], Awaitable[None]], name: str) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    pause = _FIRST_PAUSE_S
    while True:
        began = loop.time()
        try:
            await work()
            why = "returned"
        except asyncio.CancelledError:
            # A stray cancellation from inside `work` must not end the task; a request to cancel it must.
            if task is None or task.cancelling():
                raise
            why = "was cancelled from inside"
        except Exception as error:  # noqa: BLE001  (whatever it is, the task must go on)
            why = _place(error)
        if loop.time() - began >= _STABLE_S:
            pause = _FIRST_PAUSE_S
        log.error("background task %r %s; restarting it in %.1f s", name, why, pause)
        await asyncio.sleep(pause)
        pause = min(_LONGEST_PAUSE_S, 2 * pause)


def _place(error: Exception) -> str:
    """Type and place only: the text of a foreign exception may hold a prompt or a key."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"failed with {type(error).__name__}{where}"
