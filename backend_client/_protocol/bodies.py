"""Bodies of requests and replies as aiohttp carries them, and its errors as ours."""

from __future__ import annotations

import io
import ssl
from collections.abc import AsyncIterator

import aiohttp

from backend_client._protocol.sse import Event, EventParser, MalformedStream
from backend_client.errors import BadReply, ConnectionLost, NodeError, NodeUnreachable

_LARGE = 512 * 1024
_SMALL = 64 * 1024


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
            raise _TooLong
        chunks.append(chunk)
    return b"".join(chunks)


async def read_numbers(response: aiohttp.ClientResponse, limit: int) -> bytes | bytearray:
    """As `read_body`; a large one in memory that can be written, so that an array can lie in it without a copy."""
    length = response.content_length
    if length is None or not _SMALL < length <= limit:
        return await read_body(response, limit)
    whole = bytearray(length)
    size = 0
    async for chunk in response.content.iter_any():
        whole[size : size + len(chunk)] = chunk
        size += len(chunk)
    return whole


async def events_of(content: aiohttp.StreamReader, limit: int) -> AsyncIterator[Event]:
    """The events of a stream. Raises _TooLong for one over `limit` bytes."""
    parser = EventParser()
    size = 0
    async for chunk in content.iter_any():
        size += len(chunk)
        if size > limit:
            raise _TooLong
        for event in parser.feed(chunk):
            yield event


class _TooLong(ValueError):
    """The reply is longer than `max_reply_bytes`, or than a probe's or a refusal may be."""

    def __str__(self) -> str:
        return "it is too long"


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
        return ConnectionLost("the stream fell silent", node=node)
    if isinstance(error, aiohttp.ClientResponseError | MalformedStream | _TooLong):
        # The text of aiohttp's errors may quote the reply.
        why = "invalid HTTP" if isinstance(error, aiohttp.ClientResponseError) else error
        return BadReply(f"the reply is not one of a node: {why}", node=node)
    what = f"the connection broke before the answer was complete ({type(error).__name__})"
    if node.startswith("https:") and isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
        # TLS 1.3: the client may send before the node has looked at its certificate, and seldom gets to see the alert.
        what += "; a node with tls_client_ca ends connections so when client_cert is missing or not valid there"
    return ConnectionLost(what, node=node)


def _unreachable(error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        # It has neither the reason nor the errno of the classes that it is derived from.
        why = getattr(error.certificate_error, "verify_message", "") or type(error.certificate_error).__name__
        return f"its certificate cannot be verified: {why}; see ca_file"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "cannot connect: no answer in time"
    return f"cannot connect: {error.os_error.strerror or type(error.os_error).__name__}"


def _alert(error: BaseException) -> str | None:
    """OpenSSL's name of the alert by which the other side ended the handshake; None for any other error."""
    for found in (error, error.__cause__, getattr(error, "os_error", None)):
        reason = getattr(found, "reason", None) if isinstance(found, ssl.SSLError) else None
        if isinstance(reason, str) and "_ALERT_" in reason:
            return reason
    return None
