"""One attempt on one node: a request goes out; a typed result, or a typed error, comes back. No retries here."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from typing import Protocol

import aiohttp
from pydantic import ValidationError
from yarl import URL

from backend_client._protocol import wire
from backend_client._protocol.identity import Identity
from backend_client._protocol.report import HealthReport
from backend_client._protocol.sse import Event, EventParser, MalformedStream
from backend_client._protocol.wire import Done, EmbedReply, Reply, WireCall
from backend_client._protocol.wire_errors import event_error, status_error
from backend_client._resilience import connection_wait, connection_watch
from backend_client._resilience.connection_watch import ConnectionWatch
from backend_client._resilience.resolver import RememberingResolver
from backend_client.errors import BadReply, ConnectionLost, NodeError, NodeUnreachable, NPUError
from backend_client.options import ClientOptions

_BINARY = "application/octet-stream"
_EVENTS = "text/event-stream"
_KNOWN_EVENTS = frozenset({"token", "done", "error"})
# /health of a node with dozens of models is a few kB; an error body is less.
_SMALL = 1024 * 1024
_LARGE = 512 * 1024


class Transport(Protocol):
    """What the client needs of the network; tests replace it with a function or two.

    Every method raises NodeError when the attempt failed and RequestRejected when the request was refused. Time limits
    are the caller's: it cancels.
    """

    async def health(self, node: str) -> HealthReport:
        """What the node says of itself, also when that is that it does not serve."""
        ...

    async def embed(self, node: str, call: WireCall) -> EmbedReply:
        """POST /embeddings."""
        ...

    def stream(self, node: str, call: WireCall) -> AsyncGenerator[str | Done, None]:
        """POST /inference as a stream; each piece of text as it comes, `Done` last."""
        ...

    async def exchange(self, node: str, call: WireCall) -> Reply:
        """A request in OpenAI's dialect; the reply of any status."""
        ...

    def events(self, node: str, call: WireCall) -> AsyncGenerator[Reply | Event, None]:
        """The same as a stream: the head of the reply, then its events."""
        ...

    async def close(self) -> None:
        """Release all connections."""
        ...


class HttpTransport:
    """The transport over HTTP. Make it inside a running event loop."""

    def __init__(self, identity: Identity, options: ClientOptions) -> None:
        self._identity = identity
        self._max_reply = options.max_reply_bytes
        self._connect_timeout = options.timeouts.connect
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.timeouts.connect)
        self._stream_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=options.timeouts.connect, sock_read=options.timeouts.idle
        )
        self._urls: dict[tuple[str, str], URL] = {}
        self._resolver = RememberingResolver()
        self._session = self._make_session(options.connections_per_node)
        # Probes have connections of their own: a probe that waits for one of 128 busy connections says nothing about
        # the node.
        self._probes = self._make_session(0)

    def _make_session(self, connections_per_node: int) -> aiohttp.ClientSession:
        key = self._identity.key
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                limit_per_host=connections_per_node,
                resolver=self._resolver,
                ssl=self._identity.tls or True,
            ),
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            proxy=self._identity.proxy,
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[_connection_waits(), connection_watch.trace()],
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
        await self._probes.close()
        await self._resolver.close()

    async def health(self, node: str) -> HealthReport:
        """GET /health; 503 is an answer too, of a node that does not serve now."""
        status, _, body = await self._exchange(self._probes, node, "GET", "/health", None, {}, _SMALL)
        data = wire.parse_json(node, body)
        try:
            return HealthReport.model_validate(data)
        except ValidationError:
            pass
        raise BadReply(f"/health answered HTTP {status}, but not as a node does", node=node, status=status)

    async def embed(self, node: str, call: WireCall) -> EmbedReply:
        """POST /embeddings, with the vectors as raw float32."""
        headers, body = await self._post(node, "/embeddings", call, _BINARY, self._max_reply)
        return wire.embed_reply(node, headers, body, len(call.texts))

    async def stream(self, node: str, call: WireCall) -> AsyncGenerator[str | Done, None]:
        """POST /inference as server-sent events."""
        call.path = "/inference"
        async with aclosing(self.events(node, call)) as items:
            head = Reply(200, {})
            async for item in items:
                if isinstance(item, Event):
                    found = self._stream_item(node, head.headers, item, call)
                    if found:
                        yield found
                    if isinstance(found, Done):
                        return
                    continue
                head = item
                if head.body:
                    # A proxy, or an older node, that does not stream.
                    for part in _whole_answer(node, head):
                        yield part
                    return
        raise ConnectionLost("the stream ended before the answer did", node=node)

    async def exchange(self, node: str, call: WireCall) -> Reply:
        """Send a request to `call.path`; returns the reply, whatever its status."""
        status, headers, body = await self._exchange(
            self._session, node, call.method, call.path, call.encoded or None, call.headers("*/*"), self._max_reply
        )
        return Reply(status, {name.lower(): value for name, value in headers.items()}, body)

    async def events(self, node: str, call: WireCall) -> AsyncGenerator[Reply | Event, None]:
        """POST to `call.path` and follow the stream: the reply's head, then its events.

        The head of a reply that is JSON instead has a body. `call.refused` is the
        reply of another status than 200, which raises its error.
        """
        problem: NPUError
        try:
            async with await self._request(
                self._session, node, call.method, call.path, call.encoded, call.headers(_EVENTS), self._stream_timeout
            ) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                if response.status != 200:
                    body = await _read(response, _SMALL)
                    call.refused = Reply(response.status, headers, body)
                    problem = status_error(node, response.status, response.headers, body, call.model)
                elif response.content_type == "application/json":
                    yield Reply(200, headers, await _read(response, self._max_reply))
                    return
                elif response.content_type != _EVENTS:
                    problem = BadReply("the reply is not an event stream", node=node)
                else:
                    yield Reply(200, headers)
                    async for event in _events(response.content):
                        yield event
                    return
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = _connection_error(node, error)
        # Raised out here, so that the error which came up inside, and holds the request's headers, is not its context.
        raise problem

    def _stream_item(self, node: str, headers: Mapping[str, str], event: Event, call: WireCall) -> str | Done:
        """A piece of text, or the end; "" for an event of an unknown name, which a newer node may send.

        Raises what an `error` event means, BadReply for a known event with other contents.
        """
        if event.name not in _KNOWN_EVENTS:
            return ""
        data = wire.parse_json(node, event.data)
        text = data.get("text") if isinstance(data, dict) else None
        if event.name == "token" and isinstance(text, str):
            return text
        if event.name == "done":
            return wire.done(node, headers, data)
        if event.name == "error":
            raise event_error(node, data, call.model)
        raise BadReply("a token event in the stream has no text", node=node)

    async def _request(
        self,
        session: aiohttp.ClientSession,
        node: str,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Send a request, and connect again as long as a blocked event loop was what timed out."""
        if self._identity.node_keys:
            headers = {**self._identity.authorization(node), **headers}
        while True:
            watch = ConnectionWatch(self._connect_timeout)
            try:
                return await session.request(
                    method,
                    self._url(node, path),
                    data=None if body is None else _payload(body),
                    headers=headers,
                    allow_redirects=False,
                    timeout=timeout,
                    trace_request_ctx=watch,
                )
            except aiohttp.ConnectionTimeoutError:
                if not watch.was_blocked:
                    raise

    def _url(self, node: str, path: str) -> URL:
        """Parsed once: parsing costs as much as everything else that is done to a request here."""
        url = self._urls.get((node, path))
        if url is None:
            url = self._urls[node, path] = URL(node + path)
        return url

    async def _post(
        self, node: str, path: str, call: WireCall, accept: str, limit: int
    ) -> tuple[Mapping[str, str], bytes]:
        status, headers, body = await self._exchange(
            self._session, node, "POST", path, call.encoded, call.headers(accept), limit
        )
        if status != 200:
            raise status_error(node, status, headers, body, call.model)
        return headers, body

    async def _exchange(
        self,
        session: aiohttp.ClientSession,
        node: str,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        limit: int,
    ) -> tuple[int, Mapping[str, str], bytes]:
        try:
            async with await self._request(session, node, method, path, body, headers, self._timeout) as response:
                return response.status, response.headers, await _read(response, limit)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = _connection_error(node, error)
        # As above: out here the original, with the request's headers, is not the context.
        raise problem


def _connection_waits() -> aiohttp.TraceConfig:
    """Marks attempts that wait for one of the connections to their node."""
    trace = aiohttp.TraceConfig()

    async def begin(*_: object) -> None:
        connection_wait.mark(queued=True)

    async def end(*_: object) -> None:
        connection_wait.mark(queued=False)

    trace.on_connection_queued_start.append(begin)
    trace.on_connection_queued_end.append(end)
    return trace


def _whole_answer(node: str, reply: Reply) -> Iterator[str | Done]:
    """What a reply of /inference that is not streamed holds. Raises BadReply."""
    data = wire.parse_json(node, reply.body)
    done = wire.done(node, reply.headers, data)
    text = data.get("text")
    if not isinstance(text, str):
        raise BadReply("the reply has no text", node=node)
    if text:
        yield text
    yield done


def _payload(body: bytes) -> bytes | io.BytesIO:
    """The body as aiohttp wants it: one that is large in pieces, so that the event loop does other work in between."""
    return body if len(body) <= _LARGE else io.BytesIO(body)


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
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


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Event]:
    parser = EventParser()
    async for chunk in content.iter_any():
        for event in parser.feed(chunk):
            yield event


class _TooLong(ValueError):
    """The reply is longer than any that a node sends."""


def _connection_error(node: str, error: Exception) -> NodeError:
    """Ours for what aiohttp or the socket raised. Nothing of the original's text is taken over but the system's
    words.
    """
    if isinstance(error, aiohttp.ClientConnectorError):
        return NodeUnreachable(f"cannot connect: {error.os_error.strerror or type(error.os_error).__name__}", node=node)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return NodeUnreachable("cannot connect: no answer in time", node=node)
    if isinstance(error, aiohttp.SocketTimeoutError):
        return ConnectionLost("the stream fell silent", node=node)
    if isinstance(error, aiohttp.ClientResponseError | MalformedStream | _TooLong):
        return BadReply(f"the reply is not one of a node ({type(error).__name__.lstrip('_')})", node=node)
    return ConnectionLost(f"the connection broke before the answer was complete ({type(error).__name__})", node=node)
