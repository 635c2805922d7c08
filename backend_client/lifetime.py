"""How long things live: a call until its deadline or until its client closes, a stream within one event loop, a
background task until it is cancelled, a thread until its work is done.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

from backend_client.errors import ClientClosed, ConfigurationError
from backend_client.options import LONGEST_S

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Clock = Callable[[], float]
log = logging.getLogger(__name__)

# How long work may take to end by itself when its client closes.
_GRACE_S = 1.0
# Before a background task that failed is restarted: nodes stay unprobed for so long.
_RESTART_S = 1.0


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


class OpenCalls:
    """The calls under way in one client, all in the event loop of its first one.

    `release` is awaited once: when `close` has ended the calls, or when the tasks of that loop are cancelled, as
    `asyncio.run` does at its end. The client is closed then.
    """

    def __init__(self, release: Callable[[], Awaitable[None]] | None = None) -> None:
        self._release = release
        # Ordered, so that a simulation repeats exactly.
        self._calls: dict[asyncio.Timeout, None] = {}
        self._none = asyncio.Event()
        self._closing = asyncio.Event()
        self._end: asyncio.Task[None] | None = None
        self.closed = False

    def check(self) -> None:
        """Raise ClientClosed after the end, ConfigurationError in another event loop than that of the first call."""
        if self.closed:
            raise ClientClosed("this client is closed, as it is when its event loop ends; make a new one")
        if self._end is None:
            self._end = asyncio.create_task(self._until_closed(), name="end of the client")
        elif self._end.get_loop() is not asyncio.get_running_loop():
            raise ConfigurationError(
                "this client belongs to another event loop, or to a process that forked this one; make a client for "
                "each process and event loop, or use backend_client.sync"
            )

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None, None]:
        """A call, or a part of one, of the current task. Raises ClientClosed when the client is closed meanwhile."""
        self.check()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._calls[scope] = None
                try:
                    yield
                finally:
                    del self._calls[scope]
                    if self.closed and not self._calls:
                        self._none.set()
        except TimeoutError:
            if not scope.expired():
                raise
            raise ClientClosed("this client was closed during the call") from None

    async def close(self) -> None:
        """End all calls, wait until they have ended (at most 1 s: one may be stuck in foreign code), and release.

        A second call waits for the first. One that is cancelled leaves nothing open: closing goes on.
        """
        self.closed = True
        self._closing.set()
        if self._end is None and self._release is not None:
            await self._release()
        elif self._end is not None and self._end.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._end])

    async def _until_closed(self) -> None:
        try:
            await self._closing.wait()
            for scope in list(self._calls):
                end_now(scope)
            if self._calls:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._none.wait(), _GRACE_S)
        finally:
            self.closed = True
            if self._release is not None:
                await self._release()


STARTED: Any = None
"""What a generator of `owning` yields first; nobody gets it."""


def owning(make: Callable[P, AsyncGenerator[T, None]]) -> Callable[P, AsyncGenerator[T, None]]:
    """Decorate an async generator function whose generators own something, such as a lease or a connection.

    A generator that was never started skips its `finally` when it is closed, and leaks what it owns. So these are
    started when they are made: their `try` begins with `yield STARTED`, which is consumed here. From then on closing
    them releases what they own, as do the garbage collector and the end of the event loop.
    """

    @wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> AsyncGenerator[T, None]:
        items = make(*args, **options)
        with suppress(StopIteration):
            items.asend(None).send(None)
        return items

    return made


class HomeLoop:
    """The event loop in which a stream was begun.

    asyncio ends the generators of a loop that ends: read in the next loop, what is left would be missing.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def elsewhere(self) -> bool:
        return self._loop is not None and self._loop is not asyncio.get_running_loop()

    def enter(self) -> None:
        """Raise ConfigurationError where the stream was begun elsewhere."""
        if self.elsewhere:
            raise ConfigurationError("this stream was begun in another event loop or process; begin a new one here")
        self._loop = asyncio.get_running_loop()


class OneLoop(AsyncGenerator[T, None]):
    """An async generator that is read in the event loop that began to read it."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._home = HomeLoop()
        self._ended = False

    async def asend(self, _: None) -> T:
        """The next item. Raises ConfigurationError where it was begun elsewhere and has not ended."""
        if not self._ended:
            self._home.enter()
        try:
            return await anext(self._items)
        except StopAsyncIteration:
            self._ended = True
            raise

    async def athrow(self, *error: Any) -> T:
        return await self._items.athrow(*error)

    async def aclose(self) -> None:
        """Close it. What was begun elsewhere is not touched: its connections are used there."""
        if not self._home.elsewhere:
            await self._items.aclose()
        self._ended = True


def supervise(work: Callable[[], Awaitable[None]], name: str) -> asyncio.Task[None]:
    """Run `work` in a task until that task is cancelled.

    `work` is meant to run until cancelled. When it returns or raises, an error is logged and it is restarted after a
    second.
    """
    return asyncio.create_task(_restarting(work, name), name=name)


async def _restarting(work: Callable[[], Awaitable[None]], name: str) -> None:
    task = asyncio.current_task()
    while True:
        try:
            await work()
            why = "returned"
        except asyncio.CancelledError:
            # A stray cancellation from inside `work` must not end the task; a request to cancel it must.
            if task is None or task.cancelling():
                raise
            why = "was cancelled from inside"
        except Exception as error:  # noqa: BLE001  (whatever it is, the task must go on)
            # Type and place only: the text of a foreign exception may hold a prompt or a key.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            why = f"failed with {type(error).__name__} in {frame.filename}:{frame.lineno}"
        log.error("background task %r %s; restarting it in %.0f s", name, why, _RESTART_S)
        await asyncio.sleep(_RESTART_S)


class DaemonThread:
    """Runs functions that may hang, such as the resolver's, one after another in a thread of its own, until `end`.

    Unlike with `asyncio.to_thread`, a call that hangs neither uses up the caller's thread pool nor holds up the end of
    the event loop or of the interpreter.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], R]) -> Future[R]:
        """Run a function after those that were submitted before."""
        future: Future[R] = Future()
        self._work.put((future, function))
        return future

    async def run(self, function: Callable[[], R]) -> R:
        """The result of a function. One that has begun runs to its end, also when the caller is cancelled."""
        return await asyncio.wrap_future(self.submit(function))

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


def map_in_daemon_threads(function: Callable[[A], R], items: Sequence[A], at_once: int, name: str) -> list[R]:
    """Run a function on each item, some at once, and return the results in the items' order. Blocking.

    Raises the first error. Unlike those of an executor, its threads do not hold up the end of the interpreter.
    """
    threads = [DaemonThread(name) for _ in range(min(at_once, len(items)))]
    futures = [threads[number % at_once].submit(partial(function, item)) for number, item in enumerate(items)]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        for thread in threads:
            thread.end()


class LoopThread:
    """Runs coroutines for any other thread, in an event loop in a thread of its own that starts with the first of them.

    `close` awaits `closing` in the loop and ends the loop; so do the end of the interpreter and the garbage collector.
    """

    def __init__(self, name: str, closing: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self._closing = closing
        self._loop: _Loop | None = None
        self._starting = threading.Lock()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine there and wait for it. An interrupt of the waiting thread cancels it.

        Raises ClientClosed after `close` and when the loop is closed meanwhile; ConfigurationError in the loop's own
        thread, which would wait for itself, and in a forked child, which has neither the thread nor its connections.
        """
        loop = self._loop
        if loop is None:
            with self._starting:
                loop = self._loop = self._loop or self._start()
        problem = None
        if loop.pid != os.getpid():
            problem = "this client was used before this process was forked; make one in each process"
        elif threading.current_thread() is loop.thread:
            problem = "a blocking client cannot be called from its own event loop"
        if problem is not None:
            work.close()
            raise ConfigurationError(problem)
        future = loop.submit(work)
        try:
            return future.result()
        except CancelledError:
            if not loop.closing:
                raise
        except BaseException:
            future.cancel()
            raise
        finally:
            loop.futures.discard(future)
        raise ClientClosed("this client was closed during the call")

    def close(self) -> None:
        """End the loop and its thread. Calls of other threads end at once with ClientClosed."""
        with self._starting:
            loop = self._loop = self._loop or self._start()
        loop.end()

    def _start(self) -> _Loop:
        loop = _Loop(self._name, self._closing)
        # Of the loop and not of this object, which is garbage when it is called.
        weakref.finalize(self, loop.end)
        return loop


class Closable(Protocol[T_co]):
    """Asynchronous items that can be closed: an async generator, or a stream of results."""

    async def __anext__(self) -> T_co: ...

    async def aclose(self) -> None: ...


class LoopIterator(Iterator[T]):
    """The items of a stream that lives in the loop of a LoopThread, each waited for as in its `run`.

    No generator: closing one that was never started would not close the stream.
    """

    def __init__(self, thread: LoopThread, items: Closable[T]) -> None:
        self._thread = thread
        self._items = items

    def __next__(self) -> T:
        item = self._thread.run(self._next())
        if item is None:
            raise StopIteration
        return item

    def close(self) -> None:
        """Stop the stream."""
        with suppress(ClientClosed):
            self._thread.run(self._close())

    async def _next(self) -> T | None:
        # StopAsyncIteration cannot cross from one thread to another as the result of a coroutine.
        try:
            return await self._items.__anext__()
        except StopAsyncIteration:
            return None

    async def _close(self) -> None:
        await self._items.aclose()


class _Loop:
    """The loop of a LoopThread. It outlives that, whose end cancels the work that is left."""

    def __init__(self, name: str, closing: Callable[[], Awaitable[None]]) -> None:
        self.pid = os.getpid()
        self.closing = False
        self.futures: set[Future[Any]] = set()
        self._on_close = closing
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """Begin to run a coroutine. Raises ClientClosed."""
        # Under the lock, so that nothing is handed to a loop that has begun to end: nobody would ever run it.
        with self._lock:
            if not self.closing:
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
                self.futures.add(future)
                return future
        work.close()
        raise ClientClosed("this client is closed; make a new one")

    def end(self) -> None:
        """Close what runs in the loop, and end it. In a forked child there is nothing to end."""
        if os.getpid() != self.pid:
            return
        if threading.current_thread() is self.thread:
            # The garbage collector happened to run in the loop's own thread, which cannot wait for itself.
            threading.Thread(target=self.end).start()
            return
        with self._lock:
            if self.closing:
                return
            self.closing = True
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join()
        self._loop.close()
        for future in list(self.futures):
            future.cancel()

    def _run(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            except (KeyboardInterrupt, SystemExit):
                # Raised by a caller's callback: the task has it, and its caller gets it there. The other calls go on.
                continue
            return

    async def _close(self) -> None:
        await self._on_close()
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        if pending:
            # Work that closing has ended gets the time to raise its own error.
            await asyncio.wait(pending, timeout=_GRACE_S if self.futures else 0)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()
