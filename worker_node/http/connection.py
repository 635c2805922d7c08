"""Limits on connections: how long they may be idle, and how many may be open.

aiohttp bounds headers, pipelined requests and idle keep-alive connections. Added here: the first header of a
connection must be complete within `header_timeout_s`; a client that reads nothing of its reply for `stall_timeout_s` is
dropped, and so are the slowest readers while too much is unsent; and when too many connections are open, a new one
replaces the one that has been idle longest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.web_protocol import RequestHandler

from worker_node.core.errors import BadRequest, NodeError, Overloaded, UnsupportedMediaType
from worker_node.http.body import UNKNOWN_ENCODING
from worker_node.http.context import SERVER
from worker_node.http.middleware import request_id
from worker_node.http.replies import Renderer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds, and how many connections may serve a request at once.

    `spare_connections` more may be open, so that a request beyond the limit gets its 429. At most `unsent_bytes` of
    replies wait for their readers, or one larger reply. What a client still sends when its reply is written is read
    for `linger_s`: closing at once would reset the connection, and lose the reply.
    """

    header_timeout_s: float
    keepalive_timeout_s: float
    max_connections: int
    spare_connections: int
    stall_timeout_s: float = 30.0
    unsent_bytes: int = 256 << 20
    linger_s: float = 2.0


@dataclass(eq=False)
class Connections:
    """The connections of one server, on all of its ports.

    Malformed HTTP, which no middleware sees, is answered in the form of `render` and counted by `note`.
    """

    server: web.Server
    limits: ConnectionLimits
    note: Callable[[NodeError], None]
    render: Renderer
    # Without a request, the longest idle first; and with one.
    idle: dict[GuardedConnection, None] = field(default_factory=dict)
    busy: set[GuardedConnection] = field(default_factory=set)
    # With a reply that waits for its reader, the longest waiting first.
    unread: dict[GuardedConnection, None] = field(default_factory=dict)

    def accept(self) -> GuardedConnection:
        return GuardedConnection(self)

    def bound_unsent(self) -> None:
        """Drop those who let their reply wait longest, while too much waits; the last is not dropped."""
        unsent = {one: one.transport.get_write_buffer_size() for one in self.unread if one.transport is not None}
        total = sum(unsent.values())
        for connection, size in list(unsent.items())[:-1]:
            if total <= self.limits.unsent_bytes:
                return
            if connection.transport is not None:
                connection.transport.abort()
            total -= size


class GuardedConnection(RequestHandler):
    """aiohttp's connection with a deadline for its first header and for readers."""

    __slots__ = ("_header_timer", "_pool", "_stall_timer")

    def __init__(self, pool: Connections) -> None:
        super().__init__(
            pool.server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=pool.limits.keepalive_timeout_s,
            access_log=None,  # type: ignore[arg-type]  # the middleware writes the access log
            lingering_time=pool.limits.linger_s,
        )
        self._pool = pool
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        pool, limits = self._pool, self._pool.limits
        self._header_timer = asyncio.get_running_loop().call_later(limits.header_timeout_s, self.force_close)
        pool.idle[self] = None
        if len(pool.idle) + len(pool.busy) > limits.max_connections + limits.spare_connections:
            # The new connection itself if no other is idle.
            longest = next(iter(pool.idle))
            if longest.transport is not None:
                longest.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._pool.idle.pop(self, None)
        self._pool.busy.discard(self)
        self._pool.unread.pop(self, None)
        for timer in (self._header_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def begin_request(self) -> None:
        """A request has arrived. Raises Overloaded at the limit."""
        pool = self._pool
        pool.idle.pop(self, None)
        pool.busy.add(self)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        if len(pool.busy) > (most := pool.limits.max_connections):
            raise Overloaded(f"{most} connections have a request; the limit is max_connections", retry_after=1.0)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """As aiohttp; then the connection is idle."""
        finished = await super().finish_response(request, resp, start_time)
        if self in self._pool.busy:
            self._pool.busy.remove(self)
            self._pool.idle[self] = None
        return finished

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_reader(None)
        self._pool.unread[self] = None
        self._pool.bound_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._pool.unread.pop(self, None)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_reader(self, unsent_before: int | None) -> None:
        """Drop the connection if the client read nothing since the last check, else check again later."""
        if self.transport is None:
            return
        unsent = self.transport.get_write_buffer_size()
        stall_timeout_s = self._pool.limits.stall_timeout_s
        if unsent_before is not None and unsent >= unsent_before:
            log.debug("a client read nothing for %g s", stall_timeout_s)
            self.transport.abort()
            return
        self._stall_timer = asyncio.get_running_loop().call_later(stall_timeout_s, self._check_reader, unsent)

    def log_exception(self, *args: object, **kwargs: object) -> None:  # noqa: ARG002
        """Log no traceback of aiohttp's unexpected errors: they come from bodies that contradict their headers."""
        error = kwargs.get("exc_info")
        level = logging.DEBUG if isinstance(error, (web.RequestPayloadError, ConnectionError)) else logging.ERROR
        log.log(level, "connection ended by %s", type(error).__name__)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002  (it may quote the request)
    ) -> web.StreamResponse:
        """Answer a request that aiohttp could not handle. Neither the log nor the reply repeats what was sent."""
        error: NodeError = BadRequest("this is not a valid HTTP request")
        if isinstance(exc, ContentEncodingError):
            error = UnsupportedMediaType(UNKNOWN_ENCODING)
        # A client that left, or was dropped for reading nothing, is not a failure of the node.
        left = isinstance(exc, ConnectionError)
        if status >= 500:
            error = NodeError("the node failed to answer; the failure is logged")
            level = logging.DEBUG if left else logging.ERROR
            log.log(level, "request failed outside of the application: %s", type(exc).__name__)
        if not left:
            self._pool.note(error)
        response = self._pool.render(error)
        response.headers["Server"] = SERVER
        response.headers["X-Request-ID"] = request_id(request)
        response.force_close()
        return response


def admit_connection(request: web.Request) -> None:
    """The check of each request, before any other: raises Overloaded when too many connections have one."""
    if isinstance(connection := request.protocol, GuardedConnection):
        connection.begin_request()
