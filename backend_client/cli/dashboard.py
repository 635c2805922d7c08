"""The dashboard of a whole fleet, on loopback; the nodes serve the very same page for themselves."""

from __future__ import annotations

import argparse
import asyncio
import base64
import errno
import hashlib
import importlib.metadata
import importlib.resources
import json
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, cast

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel

from backend_client.client import NodeStatus, NPUClient
from backend_client.errors import AttemptTimeout, BadReply, ConfigurationError, KeyRefused, NodeError
from backend_client.http.messages import new_request_id
from backend_client.http.transport import REQUEST_ID
from backend_client.settings import ClientSettings

_HOST = "127.0.0.1"
# As long as the client's own probes wait.
_PATIENCE_S = 0.8

Fetch = Callable[[str], Awaitable[dict[str, Any]]]
_Rows = list[dict[str, Any]]


class _Certification(BaseModel):
    device: str | None = None
    reason: str | None = None
    certified: str | None = None
    certified_reason: str | None = None
    certified_limit: int | None = None


class _Engine(_Certification):
    state: str


class _Model(BaseModel):
    id: str
    engines: list[_Engine] | None = None
    excluded: list[_Certification] | None = None


class _NodeState(BaseModel):
    """The parts of a node's state that the page goes through: a node of another shape would stop it for all nodes."""

    kind: Literal["node"]
    faults: list[str] | None = None
    models: list[_Model] | None = None
    history: dict[str, list[float | None] | float | None] | None = None
    devices: _Rows | None = None
    routes: list[dict[str, str | int | None]] | None = None
    failures: _Rows | None = None
    events: _Rows | None = None
    made: dict[str, dict[str, float]] | None = None
    energy: dict[str, dict[str, float]] | None = None
    npu: dict[str, Any] | None = None


class Fleet:
    """The nodes of a client, as the page shows them. `fetch` gets a node's own state and raises NodeError.

    It sends no inference requests, so it costs the nodes nothing and makes none of them unavailable.
    """

    def __init__(self, client: NPUClient, fetch: Fetch, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._fetch = fetch
        self._clock = clock
        # Of each node, whether it is usable, and the Unix time since when; None: since before this page was there.
        self._since: dict[str, tuple[bool, float | None]] = {}

    async def state(self) -> dict[str, Any]:
        """The fleet now. `at` and `since` are Unix times by this machine's clock."""
        nodes = await self._client.health()
        return {
            "kind": "fleet",
            "version": importlib.metadata.version("npu-node"),
            "at": round(self._clock(), 3),
            "nodes": await asyncio.gather(*(self._node(node) for node in nodes)),
        }

    async def _node(self, node: NodeStatus) -> dict[str, Any]:
        was_usable, since = self._since.setdefault(node.url, (node.usable, None))
        if was_usable != node.usable:
            since = self._clock()
            self._since[node.url] = node.usable, since
        state, trouble = None, node.trouble
        if node.status != "unreachable":
            try:
                state, trouble = await self._fetch(node.url), None
            except NodeError as error:
                trouble = error.what
        return {
            "url": node.url,
            "status": node.status,
            "usable": node.usable,
            "breaker": node.breaker,
            "trouble": node.trouble,
            "version": node.version,
            "since": since,
            "state": state,
            "state_trouble": trouble,
            "models": [model.model_dump() for model in node.models],
            "devices": [device.model_dump() for device in node.devices],
            "faults": node.faults,
        }


async def fetch_state(client: NPUClient, url: str) -> dict[str, Any]:
    """A node's own state, with the client's key and certificates. Raises NodeError."""
    transport = client.fleet.runtime.start()
    try:
        async with asyncio.timeout(_PATIENCE_S):
            reply = await transport.request(url, "GET", "/dashboard/state", None, {REQUEST_ID: new_request_id()})
    except TimeoutError:
        raise AttemptTimeout(f"no answer within {_PATIENCE_S:g} s", node=url) from None
    if reply.status == 401:
        raise KeyRefused("the node refuses this client's API key", node=url)
    if reply.status != 200:
        raise BadReply(f"the node answered HTTP {reply.status}; it may be older than this client", node=url)
    try:
        state = json.loads(reply.body, parse_constant=_not_json, parse_float=_finite)
        _NodeState.model_validate(state, strict=True)
    except (ValueError, RecursionError):
        raise BadReply("the node's answer is not its state", node=url) from None
    return cast("dict[str, Any]", state)


def _not_json(_: str) -> None:
    """Python reads NaN and Infinity; a browser does not, and would show nothing of the whole fleet."""
    raise ValueError


def _finite(text: str) -> float:
    """A number that JSON can carry on: 1e999 would be written as Infinity."""
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


@asynccontextmanager
async def served(client: NPUClient, port: int = 0) -> AsyncIterator[str]:
    """Serve the dashboard of the client's fleet while the block runs; yields the page's URL. Port 0 is a free one.

    Raises ConfigurationError when the port is taken.
    """
    runner = web.AppRunner(_app(Fleet(client, partial(fetch_state, client))), access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, _HOST, port).start()
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            remedy = "ports below 1024 need root" if error.errno == errno.EACCES else "choose another port"
            raise ConfigurationError(f"cannot listen on {_HOST}:{port}: {reason}; {remedy}") from None
        yield f"http://{_HOST}:{runner.addresses[0][1]}/dashboard"
    finally:
        await runner.cleanup()


def read_pages() -> dict[str, str]:
    """The dashboard and the playground by path: the latter with the former's style, and the script that both need."""
    files = importlib.resources.files("backend_client.cli")
    page, playground = ((files / name).read_text(encoding="utf-8") for name in ("dashboard.html", "playground.html"))
    for tag, end in (("style", "</style>"), ("script", "// --- ")):
        shared = page.partition(f"<{tag}>")[2].partition(end)[0]
        playground = playground.replace(f"<{tag}>", f"<{tag}>{shared}", 1)
    return {"/dashboard": page, "/play": playground}


def _app(fleet: Fleet) -> web.Application:
    html = read_pages()["/dashboard"]
    headers = page_headers(html)

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text=html, content_type="text/html", headers=headers)

    async def state(_request: web.Request) -> web.Response:
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return web.json_response(await fleet.state(), headers=headers)

    app = web.Application(middlewares=[_refuse_other_names])
    app.add_routes([web.get("/", page), web.get("/dashboard", page), web.get("/dashboard/state", state)])
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
    parser = commands.add_parser(
        "dashboard",
        help="serve a page with every node, live",
        description="`npu-client dashboard`: a page that shows every node of the fleet, live.",
    )
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (a free one)")
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace, settings: ClientSettings) -> int:
    async with NPUClient.from_settings(settings) as client, served(client, args.port) as url:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        # The kernel drops a signal without a handler where the receiver is PID 1, as in a container.
        signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(stop.set))
        print(f"the dashboard is at {url}", flush=True)
        await stop.wait()
    return 0
