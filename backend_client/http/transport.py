"""Carries requests to nodes, one attempt each: `HttpTransport` by aiohttp. No retries here."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncGenerator
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp.tracing import Trace
from pydantic import ValidationError

from backend_client.errors import AttemptTimeout, BadReply, ConnectionLost, NodeError, NodeUnreachable
from backend_client.http.addresses import Identity
from backend_client.http.messages import (
    GATEWAY,
    OWN_IDS,
    HealthReport,
    NotAnAnswer,
    Reply,
    new_request_id,
    read_json,
)
from backend_client.http.stream_forms import STREAMS
from backend_client.options import ClientOptions

if TYPE_CHECKING:
    from aiohttp.connector import Connection

REQUEST_ID = "X-Request-ID"


async def fetch_health(transport: HttpTransport, node: str) -> HealthReport:
    """GET /health; 503 is an answer too, of a node that does not serve now. Raises NodeError."""
    reply = await transport.request(node, "GET", "/health", None, {REQUEST_ID: new_request_id()}, probe=True)
    with suppress(NotAnAnswer, ValidationError):
        data = read_json(reply.body)
        if isinstance(data, dict) and data.get("server") == GATEWAY:
            what = "is an npu-gateway and not a node: give its nodes, or use it as the base_url of OpenAI's SDK"
            raise BadReply(what, node=node)
        return HealthReport.model_validate(data)
    what = f"/health answered HTTP {reply.status}, but not as a node does; check the address and the port"
    if node.rstrip("/").endswith(("/v1", "/api")):
        what = (
            f"/health answered HTTP {reply.status}; give the node's address without {node[node.rindex('/', 0, -1) :]}"
        )
    raise BadReply(what, node=node, status=reply.status)


_LARGE = 512 * 1024


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
    if isinstance(error, aiohttp.ClientResponseError | _TooLong):
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


def _check_id(node: str, sent: str, received: str | None) -> None:
    """Raise BadReply for a reply to another request, and close its connection.

    HTTP/1.1 pairs requests and replies by their order alone. One reply too many on a connection that is kept alive
    would be taken for the answer to the next request: another text's vector. Nodes repeat the id of each request. A
    proxy may give it an id of its own, but never one that this process made for another.
    """
    if received is not None and received != sent and received.startswith(OWN_IDS):
        # It may be among the free ones by now.
        if (transport := _used.get()) is not None:
            transport.abort()
        raise BadReply("the reply does not repeat the X-Request-ID that was sent: it is another request's", node=node)


# /health of a node with dozens of models is a few kB; an error body is less.
_SMALL = 1024 * 1024


class HttpTransport:
    """Make it inside a running event loop. Time limits are the caller's: it cancels. Raises NodeError."""

    def __init__(self, identity: Identity, options: ClientOptions) -> None:
        self._identity = identity
        self._max_reply = options.max_reply_bytes
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.timeouts.connect)
        self._stream_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=options.timeouts.connect, sock_read=options.timeouts.idle
        )
        self._session = self._make_session(options.connections_per_node)
        # Probes have connections of their own: a probe that waits for one of 128 busy connections says nothing about
        # the node.
        self._probes = self._make_session(0)

    def _make_session(self, connections_per_node: int) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=CleanConnector(
                limit=0,
                limit_per_host=connections_per_node,
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

    async def request(
        self, node: str, method: str, path: str, body: bytes | None, headers: dict[str, str], *, probe: bool = False
    ) -> Reply:
        """Send a request; returns the reply, whatever its status. A `probe` never waits for requests."""
        session, limit = (self._probes, _SMALL) if probe else (self._session, self._max_reply)
        try:
            async with session.request(
                method, node + path, **self._sent(node, body, headers), timeout=self._timeout
            ) as response:
                if not probe:
                    _check_id(node, headers[REQUEST_ID], response.headers.get(REQUEST_ID))
                return await _reply(response, limit)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = connection_error(node, error)
        # Raised out here, so that the error which came up inside, and holds the request's headers, is not its context.
        raise problem

    async def parts(
        self, node: str, path: str, body: bytes, headers: dict[str, str], *, lively: bool
    ) -> AsyncGenerator[Reply | bytes, None]:
        """Send a request; yields the whole reply, or the head of a stream and its bytes as they come.

        A `lively` stream must not fall silent: nodes send a comment between events now and then.
        """
        timeout = self._stream_timeout if lively else self._timeout
        try:
            async with self._session.post(node + path, **self._sent(node, body, headers), timeout=timeout) as response:
                _check_id(node, headers[REQUEST_ID], response.headers.get(REQUEST_ID))
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
        # As above.
        raise problem

    def _sent(self, node: str, body: bytes | None, headers: dict[str, str]) -> dict[str, Any]:
        key = self._identity.node_keys.get(node, self._identity.key)
        return {
            # In pieces where it is large, so that the event loop does other work in between.
            "data": io.BytesIO(body) if body and len(body) > _LARGE else body or None,
            "headers": {"Authorization": f"Bearer {key}", **headers} if key else headers,
            "allow_redirects": False,
        }


async def _reply(response: aiohttp.ClientResponse, limit: int) -> Reply:
    return Reply(response.status, _headers(response), await read_body(response, limit))


def _headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}
