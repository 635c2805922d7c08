"""Whether a connection that timed out had its time, or the caller blocked the event loop meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import aiohttp


class ConnectionWatch:
    """Watches the connecting of one request; give it to aiohttp as the request's `trace_request_ctx`.

    A timeout and the answer that it waits for may both be due when a blocked event loop goes on, and then the timeout
    wins. A timer at half of the time tells whether the loop was blocked: it fires much too late, or not at all.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._lateness: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connecting(self) -> None:
        """The connection is attempted from now on."""
        self.ended()
        self._lateness = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + self._limit / 2, self._half, loop.time() + self._limit / 2)

    def ended(self) -> None:
        """There is a connection, or an error."""
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


def trace() -> aiohttp.TraceConfig:
    """Tells each request's ConnectionWatch of its connection."""
    config = aiohttp.TraceConfig()

    async def connecting(_: object, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.connecting()

    async def ended(_: object, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.ended()

    config.on_connection_create_start.append(connecting)
    # The time limit is for the connection alone: it begins after the name was resolved.
    config.on_dns_resolvehost_end.append(connecting)
    config.on_dns_cache_hit.append(connecting)
    config.on_connection_create_end.append(ended)
    config.on_request_exception.append(ended)
    return config
