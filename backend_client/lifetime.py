"""How long things live: a call until its deadline or until its client closes, a stream within one event loop, a
background task until it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeVar, cast

from backend_client.errors import ClientClosed, ConfigurationError
from backend_client.options import LONGEST_S

_GRACE_S = 1.0
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at` is a time of `clock`, which is monotonic. What travels is always the remaining time, never a timestamp."""

    at: float
    clock: Clock = field(default=time.monotonic, repr=False)

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        """The deadline `seconds` from now, at most `LONGEST_S`."""
        return cls(clock() + min(seconds, LONGEST_S), clock)

    def remaining(self) -> float:
        """Seconds left; 0 when the time is up."""
        left = self.at - self.clock()
        return max(0.0, left)

    def remaining_ms(self) -> int:
        """Whole milliseconds left, rounded down: the node must not think it has longer than we wait."""
        return int(self.remaining() * 1000)

    def earlier(self, seconds: float) -> Deadline:
        """The deadline that many seconds before this one."""
        return Deadline(self.at - seconds, self.clock)


def end_now(scope: asyncio.Timeout) -> None:
    """End a timeout scope at once. A scope that is ending already cannot be rescheduled, and need not be."""
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())


def renew(scope: asyncio.Timeout, seconds: float, deadline: Deadline) -> None:
    """Let a timeout scope end that many seconds from now, or at the deadline."""
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time() + min(seconds, deadline.remaining()))


class OpenCall:
    """A call, or a part of one, of the current task. Use as `with`; raises ClientClosed when `end` came meanwhile.

    It is `asyncio.timeout` for an event instead of a time, at a tenth of the cost, because every call has one.
    """

    __slots__ = ("_cancelling", "_ended", "_left", "_task")

    def __init__(self, left: Callable[[OpenCall], None]) -> None:
        self._left = left
        self._ended = False

    def end(self) -> None:
        """Interrupt what the task awaits."""
        if not self._ended:
            self._ended = True
            self._task.cancel()

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a call needs a task")
        self._task = task
        self._cancelling = task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left(self)
        # Somebody else may have cancelled the task as well: then that holds.
        if self._ended and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientClosed("this client was closed during the call") from None


class OpenCalls:
    """The calls under way in one client."""

    def __init__(self) -> None:
        # Ordered, so that a simulation repeats exactly.
        self._calls: dict[OpenCall, None] = {}
        self._none = asyncio.Event()
        self.closed = False

    def check(self) -> None:
        """Raise ClientClosed after `close`."""
        if self.closed:
            raise ClientClosed("this client is closed; make a new one")

    def open(self) -> OpenCall:
        """A call that `close` ends. Raises ClientClosed after it."""
        self.check()
        call = OpenCall(self._left)
        self._calls[call] = None
        return call

    def _left(self, call: OpenCall) -> None:
        self._calls.pop(call, None)
        if not self._calls:
            self._none.set()

    async def close(self) -> None:
        """End all calls, and wait until they have ended (at most 1 s: one may be stuck in foreign code)."""
        self.closed = True
        for call in list(self._calls):
            call.end()
        if self._calls:
            self._none.clear()
            try:
                async with asyncio.timeout(_GRACE_S):
                    await self._none.wait()
            except TimeoutError:
                pass


# What belongs to one event loop: closed before that loop ends, even if nobody closes it, and of no use in another.

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


# Background tasks that never end silently: one that fails or returns is logged and restarted with backoff.

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
# A task that ran this long before it failed starts with the shortest pause again.
_STABLE_S = 30.0


def supervise(work: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    """Run `work` in a task until that task is cancelled.

    `work` is meant to run until cancelled. When it returns or raises, an error is logged and it is started again after
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


# Blocking calls of the system that may hang for long, such as the resolver or a file on a network mount.

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
