"""Work that continues when its caller leaves: unbounded, or at most so much at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from worker_node.core.errors import DeadlineExceeded, NodeError, Overloaded

R = TypeVar("R")


class BackgroundTasks:
    """Tasks that run until they end or `close` cancels them."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[None, None, R], name: str) -> asyncio.Task[R]:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class BoundedWork(BackgroundTasks):
    """At most `most` tasks, whose callers wait for the results until their deadlines.

    `full` is the message for one more, and `retry_after` how many seconds later it may be tried again; `stopped` makes
    the error for tasks that `close` ended and for later ones; `late` is the message for a deadline that has passed.
    `clock` is monotonic seconds.
    """

    def __init__(
        self,
        most: int,
        full: str,
        retry_after: float,
        stopped: Callable[[], NodeError],
        *,
        late: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._most = most
        self._full = full
        self._retry_after = retry_after
        self._stopped = stopped
        self._late = late
        self._clock = clock
        self._closed = False

    def start(self, work: Coroutine[None, None, R], name: str) -> asyncio.Task[R]:
        """Start a task. Raises Overloaded, and the error for a node that stops."""
        if self._closed:
            work.close()
            raise self._stopped()
        if len(self._running) >= self._most:
            work.close()
            raise Overloaded(self._full, retry_after=self._retry_after)
        task = super().start(work, name)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its callers may have left
        return task

    async def result(self, task: asyncio.Task[R], deadline: float = math.inf) -> R:
        """What the task returns. Raises what it raises, and DeadlineExceeded."""
        left = None if math.isinf(deadline) else max(0.0, deadline - self._clock())
        await asyncio.wait({task}, timeout=left)
        if task.cancelled():
            raise self._stopped()
        if not task.done():
            raise DeadlineExceeded(self._late)
        return task.result()

    async def close(self) -> None:
        self._closed = True
        await super().close()
