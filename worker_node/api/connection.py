"""A connection that will not be held open for nothing.

aiohttp waits for ever for the rest of a half-sent header; here a client has `header_timeout_s` from the first byte of a
request to the end of its header, then it gets 408. Malformed HTTP is answered in the node's own error format, and
connections over the limit are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from worker_node.api.dialects import Renderer
from worker_node.errors import BadRequest, NodeError, Overloaded, RequestTimeout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds, and how many connections may be open."""

    header_timeout_s: float
    keepalive_timeout_s: float
    max_connections: int


class GuardedConnection(RequestHandler):
    """aiohttp's connection with a deadline for headers and a limit on their number.

    `render` forms its errors and `note` is told of each: no middleware ever sees them.
    """

    __slots__ = ("_header_timer", "_limits", "_note", "_render", "_server")

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        limits: ConnectionLimits,
        note: Callable[[NodeError], None],
        render: Renderer,
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.keepalive_timeout_s,
            access_log=None,  # type: ignore[arg-type]  # the middleware writes the access log
            lingering_time=2.0,
        )
        self._server = server
        self._limits = limits
        self._note = note
        self._render = render
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._server.connections) > self._limits.max_connections:
            self._refuse(Overloaded(f"{self._limits.max_connections} connections are open", retry_after=1.0))

    def data_received(self, data: bytes) -> None:
        seen = self._request_count
        super().data_received(data)
        if self._request_count > seen or self._request_in_progress:
            self._stop_timer()
        elif self._header_timer is None and data:
            self._header_timer = self._loop.call_later(self._limits.header_timeout_s, self._header_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,  # noqa: ARG002
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002  (it may quote the request)
    ) -> web.StreamResponse:
        """Answer what aiohttp itself could not handle. Neither the log nor the reply repeats what was sent."""
        self.keep_alive(False)
        if status >= 500:
            # A client that is gone, or was dropped for taking nothing, is no failure of the node's.
            level = logging.DEBUG if isinstance(exc, ConnectionError) else logging.ERROR
            log.log(level, "request failed outside of the application: %s", type(exc).__name__)
            failure = NodeError("the node failed to answer; the failure is logged")
            if level == logging.ERROR:
                self._note(failure)
            return self._render(failure)
        malformed = BadRequest("this is not a valid HTTP request")
        self._note(malformed)
        response = self._render(malformed)
        response.force_close()
        return response

    def _header_is_late(self) -> None:
        self._header_timer = None
        self._refuse(RequestTimeout(f"the request header was not complete within {self._limits.header_timeout_s:g} s"))

    def _refuse(self, error: NodeError) -> None:
        """Write a reply without a request to reply to, and close."""
        transport = self.transport
        if transport is None:
            return
        self._note(error)
        response = self._render(error)
        body = response.body
        assert isinstance(body, bytes)  # noqa: S101  (every renderer makes a whole body)
        reason = {408: "Request Timeout", 429: "Too Many Requests"}[error.status]
        headers = {**response.headers, "Content-Length": str(len(body)), "Connection": "close"}
        head = [f"HTTP/1.1 {error.status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
        transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.force_close()

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
