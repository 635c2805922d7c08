"""Closing ends calls: everything that awaits inside an `open()` block ends at once with ClientClosed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from backend_client._resilience.deadline import Deadline
from backend_client.errors import ClientClosed

_GRACE_S = 1.0


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
