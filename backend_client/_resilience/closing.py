"""Closing ends calls: everything that awaits inside an `open()` block ends at once with ClientClosed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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


class OpenCalls:
    """The calls under way in one client."""

    def __init__(self) -> None:
        # Ordered, so that a simulation repeats exactly.
        self._scopes: dict[asyncio.Timeout, None] = {}
        self._none = asyncio.Event()
        self.closed = False

    def check(self) -> None:
        """Raise ClientClosed after `close`."""
        if self.closed:
            raise ClientClosed("this client is closed; make a new one")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """A call, or a part of one. Raises ClientClosed at once when the client is closed meanwhile."""
        self.check()
        scope = asyncio.timeout(None)
        ended = False
        try:
            async with scope:
                self._scopes[scope] = None
                yield
        except TimeoutError:
            # Of the call's own, or because of `close`.
            if not scope.expired():
                raise
            ended = True
        finally:
            self._scopes.pop(scope, None)
            if not self._scopes:
                self._none.set()
        if ended:
            raise ClientClosed("this client was closed during the call")

    async def close(self) -> None:
        """End all calls, and wait until they have ended (at most 1 s: one may be stuck in foreign code)."""
        self.closed = True
        for scope in self._scopes:
            end_now(scope)
        if self._scopes:
            self._none.clear()
            try:
                async with asyncio.timeout(_GRACE_S):
                    await self._none.wait()
            except TimeoutError:
                pass
