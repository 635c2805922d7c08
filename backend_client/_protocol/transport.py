"""One attempt on one node: a request goes out; a typed result, or a typed error, comes back. No retries here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol

import aiohttp
from pydantic import ValidationError
from yarl import URL

from backend_client._protocol import wire
from backend_client._protocol.bodies import connection_error, events_of, payload, read_body
from backend_client._protocol.identity import Identity
from backend_client._protocol.report import HealthReport
from backend_client._protocol.sse import Event
from backend_client._protocol.wire import Done, EmbedReply, Reply, WireCall
from backend_client._protocol.wire_errors import event_error, status_error
from backend_client._resilience.connector import WatchingConnector
from backend_client._resilience.resolver import RememberingResolver
from backend_client.errors import BadReply, ConnectionLost, NPUError
from backend_client.options import ClientOptions

_BINARY = "application/octet-stream"
_EVENTS = "text/event-stream"
_KNOWN_EVENTS = frozenset({"token", "done", "error"})
# /health of a node with dozens of models is a few kB; an error body is less.
_SMALL = 1024 * 1024


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
            connector=WatchingConnector(
                self._connect_timeout,
                limit=0,
                limit_per_host=connections_per_node,
                resolver=self._resolver,
                ssl=self._identity.tls or True,
            ),
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            proxy=self._identity.proxy,
            cookie_jar=aiohttp.DummyCookieJar(),
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
        status, headers, body = await self._exchange(
            self._session, node, "POST", "/embeddings", call.encoded, call.headers(_BINARY), self._max_reply
        )
        if status != 200:
            raise self._refusal(node, status, headers, body, call)
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
            async with self._request(
                self._session, node, call.method, call.path, call.encoded, call.headers(_EVENTS), self._stream_timeout
            ) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                if response.status != 200:
                    body = await read_body(response, _SMALL)
                    call.refused = Reply(response.status, headers, body)
                    problem = self._refusal(node, response.status, response.headers, body, call)
                elif response.content_type == "application/json":
                    yield Reply(200, headers, await read_body(response, self._max_reply))
                    return
                elif response.content_type != _EVENTS:
                    problem = BadReply("the reply is not an event stream", node=node)
                else:
                    yield Reply(200, headers)
                    async for event in events_of(response.content):
                        yield event
                    return
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = connection_error(node, error)
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
        if self._identity.node_keys:
            headers = {**self._identity.authorization(node), **headers}
        return session.request(
            method,
            self._url(node, path),
            data=None if body is None else payload(body),
            headers=headers,
            allow_redirects=False,
            timeout=timeout,
        )

    def _url(self, node: str, path: str) -> URL:
        """Parsed once: parsing costs as much as everything else that is done to a request here."""
        url = self._urls.get((node, path))
        if url is None:
            url = self._urls[node, path] = URL(node + path)
        return url

    def _refusal(self, node: str, status: int, headers: Mapping[str, str], body: bytes, call: WireCall) -> NPUError:
        return status_error(node, status, headers, body, call.model, keyed=self._identity.has_key(node))

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
            async with self._request(session, node, method, path, body, headers, self._timeout) as response:
                return response.status, response.headers, await read_body(response, limit)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = connection_error(node, error)
        # As above: out here the original, with the request's headers, is not the context.
        raise problem


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
