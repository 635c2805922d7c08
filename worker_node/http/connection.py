"""Limits on connections: how long they may be idle, and how many may be open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.web_protocol import RequestHandler

from worker_node.core.errors import BadRequest, NodeError, Overloaded, RequestTimeout
from worker_node.http.context import SERVER, new_request_id, request_id
from worker_node.http.errors import Renderer, renderer
from worker_node.http.middleware import note_failure


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds, and how many connections may be open.

    At the limit, a request whose body is still to come keeps its connection for `send_grace_s` only. A client who sends
    on after the last reply is listened to for `linger_s`.
    """

    header_timeout_s: float
    keepalive_timeout_s: float
    max_connections: int
    stall_timeout_s: float = 30.0
    send_grace_s: float = 0.25
    linger_s: float = 2.0


# Guards connections, so that idle clients cannot hold them open.
#
# aiohttp waits without end for a header, and for a reader that takes nothing. Here a client has `header_timeout_s` from
# the opening of the connection, and from the first byte of each later request, to the end of its header; a reply that
# makes no progress for `stall_timeout_s` ends the connection. At the limit of connections a new one replaces an idle
# one:
# silent ones first, then idle ones between requests, then slow senders and readers. Only if all are at work is the new
# one refused. Malformed HTTP is answered in the node's own error format.
#
# After the last reply to a client that still sends, what it sends is read and dropped for a while: closing at once
# would
# reset the connection, and the reset may overtake the reply.

log = logging.getLogger(__name__)

# What a client may send after the last reply, and how many connections at once are read from only for that.
_LINGER_BYTES = 1 << 20
_LINGERING = 64

UNKNOWN_ENCODING = "Content-Encoding: only gzip and deflate are supported; send the body uncompressed"


class GuardedConnection(RequestHandler):
    """aiohttp's connection with deadlines for headers and readers, and a limit on the number of connections.

    `render` forms its errors, and `note` records each of them, because no middleware ever sees them.
    """

    __slots__ = (
        "_header_timer",
        "_limits",
        "_linger_timer",
        "_lingered",
        "_malformed",
        "_note",
        "_render",
        "_server",
        "_since",
        "_spoke",
        "_stall_timer",
    )

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
            lingering_time=limits.linger_s,
        )
        self._server = server
        self._limits = limits
        self._note = note
        self._render = render
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        # When the connection began to do what it does: to wait, to send a request, or not to read.
        self._since = loop.time()
        self._spoke = False
        self._linger_timer: asyncio.TimerHandle | None = None
        self._lingered = 0
        self._malformed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._has_place() or self._replace_another():
            self._start_timer()
        else:
            self._refuse(Overloaded(f"{self._limits.max_connections} connections are at work", retry_after=1.0))

    def data_received(self, data: bytes) -> None:
        if self.lingers:
            self._lingered += len(data)
            if self._lingered > _LINGER_BYTES:
                self._end()
            return
        seen = self._request_count
        self._spoke = self._spoke or bool(data)
        super().data_received(data)
        if self._request_count > seen or self._request_in_progress:
            self._stop_timer()
            if self._request_count > seen:
                self._since = self._loop.time()
            if self._upgraded:
                # Nothing here speaks another protocol, and what follows would never be read as requests.
                self.close()
        elif self._header_timer is None and data:
            self._start_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._since = self._loop.time()
        self._look_at_reader(2**63)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        self._stop_stall_timer()
        self._stop_lingering()
        super().connection_lost(exc)

    @property
    def lingers(self) -> bool:
        """Whether the last reply is written, and input is read only so that the reply arrives."""
        return self._linger_timer is not None

    def dispensable(self, now: float) -> tuple[int, float] | None:
        """How dispensable the connection is, the least valuable first; None while it is at work or ending."""
        if self._force_close:
            return None
        if not self._request_in_progress and not self._messages:
            return (1 if self._request_count else 0), self._since
        if now - self._since < self._limits.send_grace_s:
            return None
        request = self._current_request
        if request is not None and not request.content.is_eof():
            return 2, self._since
        return None if self._stall_timer is None else (3, self._since)

    def drop(self) -> None:
        """End the connection to make room for another."""
        if self.transport is not None:
            self.transport.abort()
            self.force_close()

    def linger(self) -> None:
        """Let the last reply arrive: no more is written, and what comes is dropped until the client closes."""
        transport = self.transport
        if transport is None or self._force_close:
            return
        if (
            sum(isinstance(other, GuardedConnection) and other.lingers for other in self._server.connections)
            >= _LINGERING
        ):
            self.force_close()
            return
        # aiohttp reads no more requests, and does not close the connection either.
        self._force_close = True
        if transport.can_write_eof():
            transport.write_eof()
        transport.resume_reading()
        self._linger_timer = self._loop.call_later(self._limits.linger_s, self._end)

    def _end(self) -> None:
        self._stop_lingering()
        self.force_close()

    def _stop_lingering(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _has_place(self) -> bool:
        """Whether the number of connections is within the limit; lingering ones do not count."""
        most, connections = self._limits.max_connections, self._server.connections
        return len(connections) <= most or (
            sum(not (isinstance(other, GuardedConnection) and other.lingers) for other in connections) <= most
        )

    def _replace_another(self) -> bool:
        """Drop the most dispensable of the other connections; False if all are at work."""
        now = self._loop.time()
        others = (other for other in self._server.connections if other is not self)
        ranked = [
            (rank, other)
            for other in others
            if isinstance(other, GuardedConnection) and (rank := other.dispensable(now)) is not None
        ]
        if not ranked:
            return False
        _, victim = min(ranked, key=lambda item: item[0])
        victim.drop()
        return True

    def _look_at_reader(self, unsent_before: int) -> None:
        """Abort if the client took nothing since the last check, else check again later."""
        self._stall_timer = None
        if self.transport is None:
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent >= unsent_before:
            log.debug("a reader took nothing for %g s", self._limits.stall_timeout_s)
            self.drop()
            return
        self._stall_timer = self._loop.call_later(self._limits.stall_timeout_s, self._look_at_reader, unsent)

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
        self.keep_alive(False)
        if status >= 500:
            # A client that is gone, or was dropped for taking nothing, is no failure of the node's.
            level = logging.DEBUG if isinstance(exc, ConnectionError) else logging.ERROR
            log.log(level, "request failed outside of the application: %s", type(exc).__name__)
            failure = NodeError("the node failed to answer; the failure is logged")
            if level == logging.ERROR:
                self._note(failure)
            return self._rendered(failure, request_id(request))
        malformed = BadRequest("this is not a valid HTTP request")
        if isinstance(exc, ContentEncodingError):
            malformed = BadRequest(UNKNOWN_ENCODING)
        self._note(malformed)
        response = self._rendered(malformed, request_id(request))
        response.force_close()
        self._malformed = True
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """As aiohttp, but the bytes after a malformed request are not read as another one."""
        finished = await super().finish_response(request, resp, start_time)
        if self._malformed:
            self.linger()
        return finished

    def _rendered(self, error: NodeError, identity: str) -> web.Response:
        """The reply to a malformed request, with the headers that the application adds to all others."""
        response = self._render(error)
        response.headers["Server"] = SERVER
        response.headers["X-Request-ID"] = identity
        return response

    def _header_is_late(self) -> None:
        self._header_timer = None
        if not self._spoke:
            # Browsers open connections ahead of need: that is no failure, and nobody waits for a reply.
            self.force_close()
            return
        self._refuse(RequestTimeout(f"the request header was not complete within {self._limits.header_timeout_s:g} s"))

    def _refuse(self, error: NodeError) -> None:
        """Write a reply without a request to reply to, and close."""
        transport = self.transport
        if transport is None:
            return
        self._note(error)
        response = self._rendered(error, new_request_id())
        body = response.body
        assert isinstance(body, bytes)  # noqa: S101  (every renderer makes a whole body)
        reason = {408: "Request Timeout", 429: "Too Many Requests"}[error.status]
        headers = {**response.headers, "Content-Length": str(len(body)), "Connection": "close"}
        head = [f"HTTP/1.1 {error.status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
        transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.linger()

    def _start_timer(self) -> None:
        self._header_timer = self._loop.call_later(self._limits.header_timeout_s, self._header_is_late)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


# Answers the Expect header before any handler runs, in the error format of the path.

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def answering_expectations(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """The same routes; aiohttp by itself refuses unknown expectations in plain text."""
    return [
        web.RouteDef(route.method, route.path, route.handler, {**route.kwargs, "expect_handler": _expect})
        for route in routes
    ]


async def _expect(request: web.Request) -> web.StreamResponse | None:
    if request.version < (1, 1):
        return None  # to be ignored there
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0
        return None
    error = BadRequest("the only expectation that is met is Expect: 100-continue")
    note_failure(request, error)
    response = renderer(request.path)(error)
    response.force_close()
    return response
