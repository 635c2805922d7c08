"""Connections of the dashboard that idle clients cannot hold open, so that readers always get one."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

HEADER_TIMEOUT_S = 5.0
_KEEPALIVE_S = 30.0
# A browser opens six to one host.
MAX_CONNECTIONS = 64


class BoundedConnection(RequestHandler):
    """Ends unless each request's header is complete in time; at the limit, the one that waited longest ends."""

    __slots__ = ("_header_timeout_s", "_header_timer", "_server", "_waiting_since")

    def __init__(
        self, server: web.Server, loop: asyncio.AbstractEventLoop, header_timeout_s: float = HEADER_TIMEOUT_S
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=_KEEPALIVE_S,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None for none
        )
        self._server = server
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._waiting_since = loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._server.connections) > MAX_CONNECTIONS:
            self._longest_waiting().end()
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        seen = self._request_count
        super().data_received(data)
        if self._request_count > seen:
            self._waiting_since = self._loop.time()
            self._stop_timer()
        elif data and self._header_timer is None and not self._request_in_progress:
            self._start_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def ended(self) -> bool:
        """Whether it is closed or being closed."""
        return self._force_close

    @property
    def worth(self) -> tuple[bool, float]:
        """The least of all is given up first: without a request, waiting for long."""
        return self._request_count > 0, self._waiting_since

    def end(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()
            self.force_close()

    def _longest_waiting(self) -> BoundedConnection:
        """The connection to give up: silent ones before others; this one if there is no other."""
        others = [
            other
            for other in self._server.connections
            if isinstance(other, BoundedConnection) and other is not self and not other.ended
        ]
        return min(others, key=lambda other: other.worth, default=self)

    def _start_timer(self) -> None:
        self._header_timer = self._loop.call_later(self._header_timeout_s, self.end)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
