"""The fleet's dashboard over HTTP: the page and its state, on loopback and for nobody else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.resources
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import SecretStr

from backend_client._api.npu_client import NPUClient
from backend_client._cli.dashboard.connections import BoundedConnection
from backend_client._cli.dashboard.fleet import FleetWatch, StateUnavailable
from backend_client._resilience.supervision import supervise
from backend_client.errors import ConfigurationError

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
    html = (importlib.resources.files("backend_client._cli.dashboard") / "page.html").read_text(encoding="utf-8")
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
