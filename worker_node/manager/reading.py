"""Reads models' files for requests: in threads of its own, within the request's deadline, and with a bound.

A disk may be slow, or never respond (a network file system). The caller learns so by its deadline, and the threads that
other work needs stay free.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from worker_node.core.errors import DeadlineExceeded, EngineUnavailable, NodeError, Overloaded

log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")

_THREADS = 4
_MOST = 32
_RETRY_S = 5.0


class InThread(Protocol):
    """Calls a function in a thread and returns what it does."""

    def __call__(self, call: Callable[..., R], /, *arguments: object) -> Awaitable[R]:
        """See the class."""


@dataclass(eq=False, slots=True)
class _Task:
    """Work of one `name`; `begun` once a thread has taken it up."""

    name: object
    callers: int = 0
    begun: bool = False
    running: asyncio.Task[Any] | None = None


class FileReading:
    """At most `most` pieces of work at once, in `threads` threads. `clock` is monotonic seconds."""

    def __init__(
        self, *, threads: int = _THREADS, most: int = _MOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="read-models")
        self._most = most
        self._clock = clock
        self._tasks: set[_Task] = set()
        self._closed = False

    async def run(self, name: object, work: Callable[[InThread], Awaitable[R]], deadline: float) -> R:
        """Return what `work` returns, by `deadline`; `work` gets a function that calls others in a thread.

        Callers with one `name` share work that no thread has begun. Work that has begun continues when its callers
        leave, so that a later call finds it further on; other work is dropped. Raises DeadlineExceeded, Overloaded,
        EngineUnavailable when the node stops, and what `work` raises.
        """
        task = next((task for task in self._tasks if task.name == name and not task.begun), None)
        if task is None:
            task = self._start(name, work)
        running = cast("asyncio.Task[R]", task.running)
        task.callers += 1
        try:
            left = None if math.isinf(deadline) else max(0.0, deadline - self._clock())
            await asyncio.wait({running}, timeout=left)
        finally:
            task.callers -= 1
            if not (task.callers or task.begun):
                self._tasks.discard(task)  # now, so that no later caller joins it
                running.cancel()
        if running.cancelled():
            raise EngineUnavailable("the node is shutting down; use another node")
        if not running.done():
            raise DeadlineExceeded(
                "the deadline passed while the files of models were read; the disk is slow, or many models are asked "
                "for at once"
            )
        return running.result()

    def close(self) -> None:
        """End what waits. Threads end with the call that they are in."""
        self._closed = True
        for task in self._tasks:
            if task.running is not None:
                task.running.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, name: object, work: Callable[[InThread], Awaitable[R]]) -> _Task:
        if self._closed:
            raise EngineUnavailable("the node is shutting down; use another node")
        if len(self._tasks) >= self._most:
            raise Overloaded(
                f"the files of models are being read for {len(self._tasks)} other requests, which is the bound; the "
                "disk of this node is slow",
                retry_after=_RETRY_S,
            )
        task = _Task(name)

        def in_thread(call: Callable[..., A], /, *arguments: object) -> Awaitable[A]:
            def begin() -> A:
                task.begun = True
                return call(*arguments)

            return asyncio.get_running_loop().run_in_executor(self._threads, begin)

        async def run() -> R:
            return await work(in_thread)

        self._tasks.add(task)
        task.running = asyncio.create_task(run(), name="read models")
        task.running.add_done_callback(lambda ended: self._ended(task, ended))
        return task

    def _ended(self, task: _Task, running: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # All callers may have left.
        error = None if running.cancelled() else running.exception()
        if error is not None and not isinstance(error, NodeError):
            log.error("reading models failed", exc_info=error)
