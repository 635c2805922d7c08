"""The dashboard of a whole fleet, on loopback; the nodes serve the very same page for themselves."""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import importlib.metadata
import importlib.resources
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler
from pydantic import SecretStr

from backend_client.client import NPUClient
from backend_client.errors import ConfigurationError
from backend_client.lifetime import supervise
from backend_client.settings import ClientSettings
from backend_client.status import NodeStatus

# Connections of the dashboard that idle clients cannot hold open, so that readers always get one.

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


# The fleet's state on the dashboard: the client's probes of each node, and the node's own state.

PERIOD_S = 1.0
# A busy node now and then answers one look too late. Without it, the sums and shares of the fleet would jump.
_LOOKS_MISSED = 3


class StateUnavailable(Exception):
    """A node's state could not be fetched; the text says why."""


Fetch = Callable[[str], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class _Seen:
    """What was last seen of one node. `since` is the Unix time at which `usable` last changed, None if it never did.

    `missed` counts the looks since it told its `state`.
    """

    usable: bool
    since: float | None = None
    state: dict[str, Any] | None = None
    trouble: str | None = None
    missed: int = 0

    def heard(self, state: dict[str, Any] | None, trouble: str | None) -> None:
        """Record the outcome of a look: a state is kept while only a look or two were missed."""
        self.trouble = trouble
        self.missed = self.missed + 1 if state is None else 0
        if state is not None or self.missed >= _LOOKS_MISSED:
            self.state = state


class FleetWatch:
    """Looks at every node of a client each second. `fetch` gets a node's state and raises StateUnavailable.

    It sends no inference requests, so it costs the nodes nothing and moves no breaker by itself.
    """

    def __init__(self, client: NPUClient, fetch: Fetch, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._fetch = fetch
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    async def watch(self) -> None:
        """Look until cancelled."""
        await self._client.health()
        while True:
            began = time.monotonic()
            await self.look()
            await asyncio.sleep(max(0.0, began + PERIOD_S - time.monotonic()))

    async def look(self) -> None:
        """Ask every node that there is now for its state, all at once."""
        # `health` counts as a call: the page shows fresh probes even where nothing else uses the client.
        nodes = await self._client.health()
        answers = await asyncio.gather(*(self._ask(node.url) for node in nodes))
        for node, (state, trouble) in zip(nodes, answers, strict=True):
            self._note(node).heard(state, trouble)
        there = {node.url for node in nodes}
        self._seen = {url: seen for url, seen in self._seen.items() if url in there}

    async def _ask(self, url: str) -> tuple[dict[str, Any] | None, str | None]:
        try:
            return await self._fetch(url), None
        except StateUnavailable as error:
            return None, str(error)

    def _note(self, node: NodeStatus) -> _Seen:
        """Keep when a node's usability changed. Also done between two looks: the probes may be ahead of them."""
        seen = self._seen.setdefault(node.url, _Seen(node.usable))
        if seen.usable != node.usable:
            seen.usable, seen.since = node.usable, self._clock()
        if node.status == "unreachable":
            seen.state = None  # what it said last is not how it is now
        return seen

    def state(self) -> dict[str, Any]:
        """The fleet for the page. `at` and `since` are Unix times by this machine's clock."""
        return {
            "kind": "fleet",
            "version": importlib.metadata.version("npu-node"),
            "at": round(self._clock(), 3),
            "nodes": [self._node(node) for node in self._client.status()],
        }

    def _node(self, node: NodeStatus) -> dict[str, Any]:
        seen = self._note(node)
        gone = node.status == "unreachable"
        return {
            "url": node.url,
            "status": node.status,
            "usable": node.usable,
            "breaker": node.breaker,
            "trouble": node.trouble,
            "version": node.version,
            "since": seen.since,
            "state": seen.state,
            "state_trouble": node.trouble if gone else seen.trouble,
            "models": [model.model_dump() for model in node.models],
            "devices": [device.model_dump() for device in node.devices],
        }


# The fleet's dashboard over HTTP: the page and its state, on loopback and for nobody else.

_HOST = "127.0.0.1"
# As long as the client's own probes wait. A state is some 10 kB; a megabyte is not one.
_PATIENCE_S = 0.8
_LARGEST = 1024 * 1024


class StateReader:
    """Fetches nodes' states. Make it inside a running event loop, and `close` it."""

    def __init__(self, api_key: SecretStr | None) -> None:
        headers = {"Authorization": f"Bearer {api_key.get_secret_value()}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=_PATIENCE_S), cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def __call__(self, node: str) -> dict[str, Any]:
        """A node's state. Raises StateUnavailable; its text holds nothing of the request."""
        try:
            async with self._session.get(node + "/dashboard/state", allow_redirects=False) as response:
                if response.status == 401:
                    raise StateUnavailable("the node refuses this client's API key")
                if response.status != 200:
                    raise StateUnavailable(
                        f"the node answered HTTP {response.status}; it may be older than this client"
                    )
                if not 0 < (response.content_length or 0) <= _LARGEST:
                    raise StateUnavailable("what it answered is no state of a node")
                state = json.loads(await response.read())
        except TimeoutError:
            raise StateUnavailable(f"no answer within {_PATIENCE_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise StateUnavailable(f"cannot be reached ({type(error).__name__})") from None
        except ValueError:
            raise StateUnavailable("what it answered is no state of a node") from None
        if not isinstance(state, dict) or state.get("kind") != "node":
            raise StateUnavailable("what it answered is no state of a node")
        return state


@asynccontextmanager
async def served(client: NPUClient, api_key: SecretStr | None, port: int = 0) -> AsyncIterator[str]:
    """Serve the dashboard of the client's fleet while the block runs; yields the page's URL. Port 0 is a free one.

    Raises ConfigurationError when the port is taken.
    """
    reader = StateReader(api_key)
    fleet = FleetWatch(client, reader)
    watcher = supervise(fleet.watch, "fleet watch")
    runner = web.AppRunner(_app(fleet), access_log=None)
    await runner.setup()
    try:
        listener = await _listen(runner, port)
        try:
            yield f"http://{_HOST}:{listener.sockets[0].getsockname()[1]}/dashboard"
        finally:
            listener.close()
    finally:
        await runner.cleanup()
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await reader.close()


async def _listen(runner: web.AppRunner, port: int) -> asyncio.Server:
    server = runner.server
    assert server is not None  # noqa: S101  (setup() made it)
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(lambda: BoundedConnection(server, loop), _HOST, port)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {_HOST}:{port}: {error.strerror}; choose another port") from None


def _app(fleet: FleetWatch) -> web.Application:
    html = (importlib.resources.files("backend_client.cli") / "dashboard.html").read_text(encoding="utf-8")
    headers = page_headers(html)

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text=html, content_type="text/html", headers=headers)

    async def state(_request: web.Request) -> web.Response:
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return web.json_response(fleet.state(), headers=headers)

    app = web.Application(middlewares=[_refuse_other_names])
    app.add_routes([web.get("/dashboard", page), web.get("/dashboard/state", state)])
    return app


@web.middleware
async def _refuse_other_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A page from elsewhere, even one whose name was made to point at this machine, must not read the fleet's state."""
    hosts, origins = request.headers.getall("Host", []), request.headers.getall("Origin", [])
    named = hosts[0].partition(":")[0].lower() if len(hosts) == 1 else None
    if named not in {_HOST, "localhost"} or request.url.host != named:
        raise web.HTTPForbidden(text="this dashboard is served to this machine, by the name localhost or 127.0.0.1")
    if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
        raise web.HTTPForbidden(text="requests from pages of other sites are refused")
    return await handler(request)


def page_headers(html: str) -> dict[str, str]:
    """The browser runs only the script and the style that are in the page, and talks only to this server."""
    policy = {
        "default-src": "'none'",
        "script-src": f"'{_inline_hash(html, 'script')}'",
        "style-src": f"'{_inline_hash(html, 'style')}'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _inline_hash(html: str, tag: str) -> str:
    _, _, rest = html.partition(f"<{tag}>")
    digest = hashlib.sha256(rest.partition(f"</{tag}>")[0].encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "dashboard",
        help="serve a page with every node, live",
        description="`npu-client dashboard`: a page that shows every node of the fleet, live.",
    )
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (a free one)")
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace, settings: ClientSettings) -> int:
    """Serve until interrupted."""
    async with NPUClient.from_settings(settings) as client, served(client, settings.api_key, args.port) as url:
        print(f"the dashboard is at {url}", flush=True)
        await asyncio.Event().wait()
    return 0
