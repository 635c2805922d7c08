"""Connections that say what a request waits for: a free one, or a new one that the event loop may have held up."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp.tracing import Trace

from backend_client._resilience import connection_wait
from backend_client._resilience.connection_watch import ConnectionWatch

if TYPE_CHECKING:
    from aiohttp.connector import Connection


_used: ContextVar[asyncio.Transport | None] = ContextVar("connection", default=None)


def break_connection() -> None:
    """Close the connection of this task's last request, though it may be among the free ones by now."""
    transport = _used.get()
    if transport is not None:
        transport.abort()


class WatchingConnector(aiohttp.TCPConnector):
    """Connects again as long as a blocked event loop was what timed out; `connect_limit`: seconds for each.

    It traces the connecting alone. Traces of a session follow the whole request, which costs each request more than
    everything else that this package does to it.
    """

    def __init__(self, connect_limit: float, **options: Any) -> None:
        super().__init__(**options)
        self._connect_limit = connect_limit

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """As in aiohttp. Raises TimeoutError."""
        while True:
            steps = _Steps(self._connect_limit)
            try:
                connection = await super().connect(req, [*traces, steps], timeout)
                if steps.reused and connection.protocol is not None and connection.protocol.should_close:
                    # What came while it was free would be taken for the reply to this request.
                    connection.close()
                    continue
                _used.set(connection.transport)
                return connection
            except TimeoutError:
                if not steps.was_blocked:
                    raise
            finally:
                steps.ended()


class _Steps(ConnectionWatch, Trace):
    """What happens on the way to one connection; `reused`: it was free."""

    reused = False

    async def send_connection_queued_start(self) -> None:
        connection_wait.mark(queued=True)

    async def send_connection_queued_end(self) -> None:
        connection_wait.mark(queued=False)

    async def send_connection_reuseconn(self) -> None:
        self.reused = True

    async def send_connection_create_start(self) -> None:
        self.connecting()

    async def send_connection_create_end(self) -> None:
        self.ended()

    async def send_dns_resolvehost_start(self, host: str) -> None:
        """The time limit is for the connection alone: it begins after the name was resolved."""

    async def send_dns_resolvehost_end(self, host: str) -> None:  # noqa: ARG002  (aiohttp's signature)
        self.connecting()

    async def send_dns_cache_hit(self, host: str) -> None:  # noqa: ARG002
        self.connecting()

    async def send_dns_cache_miss(self, host: str) -> None:
        """Nothing to watch."""
