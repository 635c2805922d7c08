"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from backend_client.errors import ClientClosed, ConfigurationError

R = TypeVar("R")

# How long work may take to end by itself when the loop closes, before it is cancelled.
_GRACE_S = 1.0


class _Work:
    """The work that callers wait for. It outlives the LoopThread, whose end cancels what is left of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.futures: set[Future[Any]] = set()
        self.closing = False


class LoopThread:
    """Runs coroutines for any other thread.

    `close` awaits `closing` in the loop and ends the loop; so do the end of the interpreter and the garbage collector.
    """

    def __init__(self, name: str, closing: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self._closing = closing
        # A forked child has this object, but neither the thread nor the loop: it starts its own with its first call.
        self._starting = threading.Lock()
        os.register_at_fork(after_in_child=_renewed(weakref.ref(self)))
        self._start()

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._work = _Work()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _stop, self._loop, self._thread, self._pid, self._work, self._closing)

    @property
    def closed(self) -> bool:
        """Whether the loop has ended."""
        return not self._end.alive

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine there and wait for it. An interrupt of the waiting thread cancels it.

        Raises ClientClosed after `close` and when the loop is closed meanwhile; ConfigurationError in the loop's own
        thread, which would wait for itself: a deadlock. In a forked child a new loop and thread start.
        """
        with self._starting:
            if os.getpid() != self._pid and not self.closed:
                self._start()
        if threading.current_thread() is self._thread:
            work.close()
            raise ConfigurationError("a blocking client cannot be called from its own event loop")
        future = self._submit(work)
        try:
            return future.result()
        except CancelledError:
            if not self._work.closing:
                raise
        except BaseException:
            future.cancel()
            raise
        finally:
            self._work.futures.discard(future)
        raise ClientClosed("this client was closed during the call")

    def close(self) -> None:
        """End the loop and its thread. Calls of other threads end at once with ClientClosed."""
        self._end()

    def _submit(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        # Under the lock, so that nothing is handed to a loop that has begun to end: nobody would ever run it.
        with self._work.lock:
            if not self._work.closing and not self.closed:
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
                self._work.futures.add(future)
                return future
        work.close()
        raise ClientClosed("this client is closed; make a new one")


def _renewed(thread: weakref.ref[LoopThread]) -> Callable[[], None]:
    """After a fork: another thread of the parent may have held the lock."""

    def renew() -> None:
        found = thread()
        if found is not None:
            vars(found)["_starting"] = threading.Lock()

    return renew


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            # Raised by a caller's callback: the task has it, and its caller gets it there. The other calls go on.
            continue
        return


def _stop(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    pid: int,
    work: _Work,
    closing: Callable[[], Awaitable[None]],
) -> None:
    if os.getpid() != pid:
        return
    if threading.current_thread() is thread:
        # The garbage collector happened to run in the loop's own thread, which cannot wait for itself.
        threading.Thread(target=_stop, args=(loop, thread, pid, work, closing)).start()
        return
    with work.lock:
        work.closing = True

    async def close() -> None:
        await closing()
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        if pending:
            # Work that `closing` has ended gets the time to raise its own error.
            await asyncio.wait(pending, timeout=_GRACE_S if work.futures else 0)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()

    asyncio.run_coroutine_threadsafe(close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    for future in list(work.futures):
        future.cancel()
