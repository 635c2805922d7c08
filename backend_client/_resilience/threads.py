"""Blocking calls of the system that may hang for long, such as the resolver or a file on a network mount."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

A = TypeVar("A")
R = TypeVar("R")


class DaemonThread:
    """Runs functions one after another, in a thread of its own, until `end`.

    Unlike with `asyncio.to_thread`, a call that hangs neither uses up the caller's thread pool nor holds up the end of
    the event loop or of the interpreter.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, function: Callable[[], R]) -> R:
        """The result of a function. One that has begun runs to its end, also when the caller is cancelled."""
        future: Future[R] = Future()
        self._work.put((future, function))
        return await asyncio.wrap_future(future)

    def end(self) -> None:
        """End the thread after the functions that it was given."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, function = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001  (it is raised in the event loop)
                    future.set_exception(error)
            del work, future, function


async def in_daemon_thread(function: Callable[[], R], name: str) -> R:
    """Run a function in a thread of its own and return its result."""
    thread = DaemonThread(name)
    try:
        return await thread.run(function)
    finally:
        thread.end()


class Shared:
    """At most one call of a function at a time, shared by all of its callers; it continues when they leave."""

    def __init__(self) -> None:
        self._running: dict[object, asyncio.Future[object]] = {}

    async def run(self, key: object, function: Callable[[], R], name: str) -> R:
        """The result of the call under way for `key`, or of a new one."""
        running = self._running.get(key)
        if running is None or running.get_loop() is not asyncio.get_running_loop():
            running = self._running[key] = asyncio.ensure_future(in_daemon_thread(function, name))
            running.add_done_callback(lambda done: self._ended(key, done))
        return cast("R", await asyncio.shield(running))

    async def close(self) -> None:
        """Stop waiting for all calls."""
        running = list(self._running.values())
        for call in running:
            call.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, key: object, done: asyncio.Future[object]) -> None:
        if self._running.get(key) is done:
            del self._running[key]
        if not done.cancelled():
            done.exception()  # Retrieved: its callers may have left.


def map_in_daemon_threads(function: Callable[[A], R], items: Sequence[A], at_once: int, name: str) -> list[R]:
    """Run a function on each item, some at once, and return the results in the items' order. Blocking.

    Raises the first error, and begins no other item after it. Unlike those of an executor, its threads do not hold up
    the end of the interpreter.
    """
    waiting: SimpleQueue[int] = SimpleQueue()
    for number in range(len(items)):
        waiting.put(number)
    results: dict[int, R] = {}
    failed: list[Exception] = []

    def run() -> None:
        while not failed:
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            try:
                results[number] = function(items[number])
            except Exception as error:  # noqa: BLE001  (it is raised in the calling thread)
                failed.append(error)

    threads = [threading.Thread(target=run, name=name, daemon=True) for _ in range(min(at_once, len(items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [results[number] for number in range(len(items))]
