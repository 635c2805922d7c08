"""Requests to nodes over HTTP: one attempt each, no retries here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager

import aiohttp
from yarl import URL

from backend_client._protocol.bodies import connection_error, events_of, payload, read_body, read_numbers
from backend_client._protocol.identity import Identity
from backend_client._protocol.node_api import BINARY, REQUEST_ID, NodeApi
from backend_client._protocol.request_ids import RequestIds
from backend_client._protocol.sse import Event
from backend_client._protocol.wire import Reply, WireCall
from backend_client._protocol.wire_errors import needs_node_error
from backend_client._resilience.connector import WatchingConnector, break_connection
from backend_client._resilience.resolver import RememberingResolver
from backend_client.errors import BadReply, NPUError
from backend_client.options import ClientOptions

_EVENTS = "text/event-stream"
# /health of a node with dozens of models is a few kB; an error body is less.
_SMALL = 1024 * 1024


class HttpTransport(NodeApi):
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
        self._ids = RequestIds()
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

    async def events(self, node: str, call: WireCall) -> AsyncGenerator[Reply | Event, None]:
        """See NodeApi."""
        problem: NPUError
        try:
            async with self._request(
                self._session, node, call.method, call.path, call.encoded, call.headers(_EVENTS), self._stream_timeout
            ) as response:
                self._check_id(node, call.request_id, response)
                headers = {name.lower(): value for name, value in response.headers.items()}
                if response.status != 200:
                    body = await read_body(response, _SMALL)
                    call.refused = Reply(response.status, headers, body)
                    problem = self.refusal(node, response.status, response.headers, body, call)
                elif response.content_type == "application/json":
                    yield Reply(200, headers, await read_body(response, self._max_reply))
                    return
                elif response.content_type != _EVENTS:
                    problem = BadReply("the reply is not an event stream", node=node)
                else:
                    yield Reply(200, headers)
                    async for event in events_of(response.content, self._max_reply):
                        yield event
                    return
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = connection_error(node, error)
        # Raised out here, so that the error which came up inside, and holds the request's headers, is not its context.
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

    def _check_id(self, node: str, sent: str, response: aiohttp.ClientResponse) -> None:
        """Raises BadReply for a reply to another request, and closes its connection."""
        by_node = response.status == 200 or needs_node_error(response.status)
        try:
            self._ids.check(node, sent, response.headers.get(REQUEST_ID), by_node=by_node)
        except BadReply:
            break_connection()
            raise

    def _url(self, node: str, path: str) -> URL:
        """Parsed once: parsing costs as much as everything else that is done to a request here."""
        url = self._urls.get((node, path))
        if url is None:
            url = self._urls[node, path] = URL(node + path)
        return url

    def has_key(self, node: str) -> bool:
        """Whether requests to a node carry an API key."""
        return self._identity.has_key(node)

    async def request(
        self, node: str, method: str, path: str, body: bytes | None, headers: dict[str, str], *, probe: bool = False
    ) -> tuple[int, Mapping[str, str], bytes | bytearray]:
        """See NodeApi."""
        session, limit = (self._probes, _SMALL) if probe else (self._session, self._max_reply)
        try:
            async with self._request(session, node, method, path, body, headers, self._timeout) as response:
                if probe:
                    self._ids.probed(node, headers[REQUEST_ID], response.headers.get(REQUEST_ID))
                else:
                    self._check_id(node, headers[REQUEST_ID], response)
                read = read_numbers if response.status == 200 and headers.get("Accept") == BINARY else read_body
                return response.status, response.headers, await read(response, limit)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = connection_error(node, error)
        # As above: out here the original, with the request's headers, is not the context.
        raise problem
