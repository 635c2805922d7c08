"""The requests that the client sends to nodes: one attempt each, no retries here.

`Transport` says which requests nodes know, `HttpTransport` carries them by aiohttp.
"""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.tracing import Trace
from pydantic import ValidationError

from backend_client.errors import AttemptTimeout, BadReply, ConnectionLost, NodeError, NodeUnreachable, NPUError
from backend_client.http.answers import read_json
from backend_client.http.forwarding import STREAMS
from backend_client.http.health import GATEWAY, HealthReport
from backend_client.http.messages import NotAnAnswer, Reply, WireCall, new_request_id
from backend_client.http.sse import Event, EventParser, MalformedStream
from backend_client.http.tls import Identity
from backend_client.lifetime import Shared
from backend_client.options import ClientOptions

if TYPE_CHECKING:
    from aiohttp.connector import Connection

REQUEST_ID = "X-Request-ID"


class Transport(ABC):
    """The requests that nodes know, given how one request is carried: `request`, `events` and `close`.

    Every method raises NodeError when the attempt failed and RequestRejected when the request was refused. Time limits
    are the caller's: it cancels.
    """

    @abstractmethod
    async def request(
        self, node: str, method: str, path: str, body: bytes | None, headers: dict[str, str], *, probe: bool = False
    ) -> Reply:
        """Send a request; returns the reply, whatever its status. A `probe` never waits for requests."""

    @abstractmethod
    def events(self, node: str, call: WireCall) -> AsyncGenerator[Reply | Event, None]:
        """A request to `call.path` as a stream: the head of the reply, then its events.

        A reply with another status than 200 has its body in the head, and no events.
        """

    def parts(self, node: str, call: WireCall, *, streamed: bool) -> AsyncGenerator[Reply | bytes, None]:
        """A request to `call.path`: the whole reply, or the head of a stream and its bytes as they come.

        A `streamed` one must not fall silent.
        """
        raise NotImplementedError

    @abstractmethod
    async def close(self) -> None:
        """Release all connections."""

    async def health(self, node: str) -> HealthReport:
        """GET /health; 503 is an answer too, of a node that does not serve now."""
        reply = await self.request(node, "GET", "/health", None, {REQUEST_ID: new_request_id()}, probe=True)
        gateway = False
        try:
            data = read_json(reply.body)
            gateway = isinstance(data, dict) and data.get("server") == GATEWAY
            if not gateway:
                return HealthReport.model_validate(data)
        except (NotAnAnswer, ValidationError):
            pass
        if gateway:
            what = "is an npu-gateway and not a node: give its nodes, or use it as the base_url of OpenAI's SDK"
            raise BadReply(what, node=node)
        what = f"/health answered HTTP {reply.status}, but not as a node does; check the address and the port"
        raise BadReply(what, node=node, status=reply.status)

    async def exchange(self, node: str, call: WireCall) -> Reply:
        """A request to `call.path`; the reply of any status."""
        return await self.request(node, call.method, call.path, call.encoded or None, call.headers())


_LARGE = 512 * 1024


def payload(body: bytes) -> bytes | io.BytesIO:
    """The body as aiohttp wants it: one that is large in pieces, so that the event loop does other work in between."""
    return body if len(body) <= _LARGE else io.BytesIO(body)


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body. Raises _TooLong for one over `limit` bytes, without reading it all."""
    if response.content_length is not None and response.content_length <= limit:
        return await response.read()
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > limit:
            raise _TooLong("it is too long")
        chunks.append(chunk)
    return b"".join(chunks)


async def events_of(content: aiohttp.StreamReader, limit: int) -> AsyncIterator[Event]:
    """The events of a stream. Raises _TooLong for one over `limit` bytes."""
    parser = EventParser()
    size = 0
    async for chunk in content.iter_any():
        size += len(chunk)
        if size > limit:
            raise _TooLong("it is too long")
        for event in parser.feed(chunk):
            yield event


class _TooLong(ValueError):
    """The reply is longer than `max_reply_bytes`, or than a probe's or a refusal may be."""


def connection_error(node: str, error: Exception) -> NodeError:
    """Ours for what aiohttp or the socket raised. Nothing of the original's text is taken over but the system's
    words.
    """
    alert = _alert(error)
    if alert is not None:
        kind = NodeUnreachable if isinstance(error, aiohttp.ClientConnectorError) else ConnectionLost
        return kind(f"the node refused the TLS handshake ({alert}); check client_cert and client_key", node=node)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return NodeUnreachable(_unreachable(error), node=node)
    if isinstance(error, aiohttp.SocketTimeoutError):
        return AttemptTimeout("the stream fell silent", node=node)
    if isinstance(error, aiohttp.ClientResponseError | MalformedStream | _TooLong):
        # The text of aiohttp's errors may quote the reply.
        why = "invalid HTTP" if isinstance(error, aiohttp.ClientResponseError) else error
        return BadReply(f"the reply is not one of a node: {why}", node=node)
    what = f"the connection broke before the answer was complete ({type(error).__name__})"
    if node.startswith("https:") and isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        # TLS 1.3: the client may send before the node has looked at its certificate, and seldom gets to see the alert.
        what += "; a node with tls_client_ca ends connections so when client_cert is missing or not valid there"
    return ConnectionLost(what, node=node)


# What OpenSSL calls an answer that is not TLS, by its version.
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"})


def _unreachable(error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        # It has neither the reason nor the errno of the classes that it is derived from.
        why = getattr(error.certificate_error, "verify_message", "") or type(error.certificate_error).__name__
        return f"its certificate cannot be verified: {why}; see ca_file"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "cannot connect: no answer in time"
    if getattr(error.os_error, "reason", None) in _NO_TLS:
        return "cannot connect: what listens there does not speak TLS; write http:// for a node without a certificate"
    return f"cannot connect: {error.os_error.strerror or type(error.os_error).__name__}"


def _alert(error: BaseException) -> str | None:
    """OpenSSL's name of the alert by which the other side ended the handshake; None for any other error."""
    for found in (error, error.__cause__, getattr(error, "os_error", None)):
        reason = getattr(found, "reason", None) if isinstance(found, ssl.SSLError) else None
        if isinstance(reason, str) and "_ALERT_" in reason:
            return reason
    return None


_used: ContextVar[asyncio.Transport | None] = ContextVar("connection", default=None)


def break_connection() -> None:
    """Close the connection of this task's last request, though it may be among the free ones by now."""
    transport = _used.get()
    if transport is not None:
        transport.abort()


class CleanConnector(aiohttp.TCPConnector):
    """Reuses no connection on which something came while it was free: it would be taken for the next reply."""

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        while True:
            connection = await super().connect(req, traces, timeout)
            if connection.protocol is None or not connection.protocol.should_close:
                _used.set(connection.transport)
                return connection
            connection.close()


# With the addresses of last time at hand there is little to wait for; without, a probe waits 0.8 s.
_KNOWN_WAIT_S = 0.2
_UNKNOWN_WAIT_S = 2.0


class RememberingResolver(AbstractResolver):
    """The system's resolver; while it hangs or fails, the addresses that it returned last."""

    def __init__(self) -> None:
        self._shared = Shared()
        self._last: dict[tuple[str, int, int], list[ResolveResult]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises OSError when nothing is known."""
        key = (host, port, int(family))
        last = self._last.get(key)
        try:
            async with asyncio.timeout(_UNKNOWN_WAIT_S if last is None else _KNOWN_WAIT_S):
                found = await self._shared.run(key, lambda: _look_up(host, port, family), f"resolve {host}")
        except OSError as error:
            if last is not None:
                return last
            raise OSError(None, error.strerror or f"the resolver does not answer for {host}") from None
        self._last[key] = found
        return found

    async def close(self) -> None:
        await self._shared.close()


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [
        ResolveResult(
            hostname=host,
            host=str(address[0]),
            port=int(address[1]),
            family=kind,
            proto=protocol,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for kind, _, protocol, _, address in found
    ]


# As many ids as are remembered: a surplus reply is one to an earlier request on the same connection.
REMEMBERED = 4096


class RequestIds:
    """Compares the ids of replies with those that were sent, which nodes repeat as `X-Request-ID`.

    HTTP/1.1 pairs requests and replies by their order alone. One reply too many on a connection that is kept alive
    would be taken for the answer to the next request: another text's vector.

    Nodes repeat the id of each request. A reply without one is accepted, and one with an id that this client has not
    sent: there are proxies that give requests ids of their own.
    """

    def __init__(self) -> None:
        self._sent: dict[str, None] = {}

    def send(self, identifier: str) -> None:
        """Record that a request with this id is sent to a node."""
        self._sent[identifier] = None
        if len(self._sent) > REMEMBERED:
            del self._sent[next(iter(self._sent))]

    def check(self, node: str, sent: str, received: str | None) -> None:
        """Raise BadReply for a reply to another request; its connection must not be used again."""
        if received != sent and received in self._sent:
            raise BadReply(
                "the reply does not repeat the X-Request-ID that was sent: it is another request's", node=node
            )


_EVENTS = "text/event-stream"
# /health of a node with dozens of models is a few kB; an error body is less.
_SMALL = 1024 * 1024


class HttpTransport(Transport):
    """The transport over HTTP. Make it inside a running event loop."""

    def __init__(self, identity: Identity, options: ClientOptions) -> None:
        self._identity = identity
        self._max_reply = options.max_reply_bytes
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.timeouts.connect)
        self._stream_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=options.timeouts.connect, sock_read=options.timeouts.idle
        )
        self._ids = RequestIds()
        self._resolver = RememberingResolver()
        self._session = self._make_session(options.connections_per_node)
        # Probes have connections of their own: a probe that waits for one of 128 busy connections says nothing about
        # the node.
        self._probes = self._make_session(0)

    def _make_session(self, connections_per_node: int) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=CleanConnector(
                limit=0,
                limit_per_host=connections_per_node,
                resolver=self._resolver,
                ssl=self._identity.tls or True,
            ),
            headers={"Accept-Encoding": "identity"},
            proxy=self._identity.proxy,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()
        await self._probes.close()
        await self._resolver.close()

    async def events(self, node: str, call: WireCall) -> AsyncGenerator[Reply | Event, None]:
        problem: NPUError
        try:
            async with self._request(
                self._session, node, call.method, call.path, call.encoded, call.headers(), self._stream_timeout
            ) as response:
                self._check_id(node, call.request_id, response)
                if response.status != 200:
                    yield await _reply(response, _SMALL)
                    return
                if response.content_type == _EVENTS:
                    yield Reply(200, _headers(response))
                    async for event in events_of(response.content, self._max_reply):
                        yield event
                    return
                problem = BadReply("the reply is not an event stream", node=node)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = connection_error(node, error)
        # Raised out here, so that the error which came up inside, and holds the request's headers, is not its context.
        raise problem

    async def parts(self, node: str, call: WireCall, *, streamed: bool) -> AsyncGenerator[Reply | bytes, None]:
        problem: NPUError
        timeout = self._stream_timeout if streamed else self._timeout
        try:
            async with self._request(
                self._session, node, call.method, call.path, call.encoded or None, call.headers(), timeout
            ) as response:
                self._check_id(node, call.request_id, response)
                if response.status != 200 or response.content_type not in STREAMS:
                    yield await _reply(response, self._max_reply if response.status == 200 else _SMALL)
                    return
                yield Reply(200, _headers(response))
                size = 0
                async for chunk in response.content.iter_any():
                    size += len(chunk)
                    if size > self._max_reply:
                        raise _TooLong("it is too long")
                    yield chunk
                return
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = connection_error(node, error)
        raise problem

    def _request(
        self,
        session: aiohttp.ClientSession,
        node: str,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout: aiohttp.ClientTimeout,
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """A request; entered, it is sent, and the head of its reply is there."""
        if session is self._session:
            self._ids.send(headers[REQUEST_ID])
        headers = {**self._identity.authorization(node), **headers}
        return session.request(
            method,
            node + path,
            data=None if body is None else payload(body),
            headers=headers,
            allow_redirects=False,
            timeout=timeout,
        )

    def _check_id(self, node: str, sent: str, response: aiohttp.ClientResponse) -> None:
        """Raises BadReply for a reply to another request, and closes its connection."""
        try:
            self._ids.check(node, sent, response.headers.get(REQUEST_ID))
        except BadReply:
            break_connection()
            raise

    async def request(
        self, node: str, method: str, path: str, body: bytes | None, headers: dict[str, str], *, probe: bool = False
    ) -> Reply:
        session, limit = (self._probes, _SMALL) if probe else (self._session, self._max_reply)
        try:
            async with self._request(session, node, method, path, body, headers, self._timeout) as response:
                if not probe:
                    self._check_id(node, headers[REQUEST_ID], response)
                return await _reply(response, limit)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = connection_error(node, error)
        # As above: out here the original, with the request's headers, is not the context.
        raise problem


async def _reply(response: aiohttp.ClientResponse, limit: int) -> Reply:
    return Reply(response.status, _headers(response), await read_body(response, limit))


def _headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}
