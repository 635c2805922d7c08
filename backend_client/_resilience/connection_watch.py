"""Whether a connection that timed out had its full time, or the caller blocked the event loop meanwhile."""

from __future__ import annotations

import asyncio


class ConnectionWatch:
    """Watches the connecting of one request.

    A timeout and the answer that it waits for may both be due when a blocked event loop goes on, and then the timeout
    wins. A timer at half of the time tells whether the loop was blocked: it fires much too late, or not at all.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._lateness: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connecting(self) -> None:
        """Record that the connection attempt starts."""
        self.ended()
        self._lateness = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + self._limit / 2, self._half, loop.time() + self._limit / 2)

    def ended(self) -> None:
        """Record that there is a connection, or an error."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def was_blocked(self) -> bool:
        """Whether the event loop was blocked at half of the time, for at least a quarter of it."""
        return self._lateness is None or self._lateness > self._limit / 4

    def _half(self, due: float) -> None:
        self._timer = None
        self._lateness = asyncio.get_running_loop().time() - due
