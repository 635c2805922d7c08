"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from backend_client.errors import ConfigurationError

R = TypeVar("R")


class LoopThread:
    """Runs coroutines for any other thread.

    `close` awaits `closing` in the loop and ends it; so do the end of the interpreter and the garbage collector.
    """

    def __init__(self, name: str, closing: Callable[[], Awaitable[None]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _stop, self._loop, self._thread, self._pid, closing)

    @property
    def closed(self) -> bool:
        """Whether the loop has ended."""
        return not self._end.alive

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine there and wait for it. An interrupt of the waiting thread cancels it.

        Raises ConfigurationError after `close`, in a forked child (its loop stayed with the parent), and in the
        loop's own thread, where waiting would be for ever.
        """
        problem = None
        if self.closed:
            problem = "this client is closed; make a new one"
        elif os.getpid() != self._pid:
            problem = "this client was made before the process forked; make one in each process"
        elif threading.current_thread() is self._thread:
            problem = "a blocking client cannot be called from its own event loop"
        if problem is not None:
            work.close()
            raise ConfigurationError(problem)
        future: Future[R] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop and its thread."""
        self._end()


def _stop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int, closing: Callable[[], Awaitable[None]]
) -> None:
    if os.getpid() != pid:
        return
    if threading.current_thread() is thread:
        # The garbage collector happened to run in the loop's own thread, which cannot wait for itself.
        threading.Thread(target=_stop, args=(loop, thread, pid, closing)).start()
        return

    async def close() -> None:
        await closing()
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()

    asyncio.run_coroutine_threadsafe(close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
