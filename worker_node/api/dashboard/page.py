"""GET /dashboard, GET /dashboard/state and GET /dashboard/history.

The page is a file of the client, which shows a whole fleet with it; the distribution always holds both packages. Here
it is found by its place and read as bytes: nothing of the client is imported.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from worker_node import __version__
from worker_node.api.dashboard.events import EventLog
from worker_node.api.dashboard.history import Histories, keep
from worker_node.api.dashboard.state import node_state
from worker_node.api.keys import NODE
from worker_node.core.errors import BadRequest, ConfigurationError

HISTORIES = web.AppKey("histories", Histories)
EVENTS = web.AppKey("events", EventLog)


def routes() -> list[web.RouteDef]:
    """The routes of the dashboard. Raises ConfigurationError when the installation lacks the page."""
    html = _page_file().read_bytes()
    headers = page_headers(html.decode())

    async def page(_request: web.Request) -> web.Response:
        return web.Response(body=html, content_type="text/html", charset="utf-8", headers=headers)

    return [
        web.get("/dashboard", page),
        web.get("/dashboard/state", _state),
        web.get("/dashboard/history", _history),
    ]


async def keep_history(app: web.Application) -> AsyncIterator[None]:
    """For `app.cleanup_ctx`: the history is kept while the application runs."""
    node, events = app[NODE], app[EVENTS]
    events.add("the node", f"started, version {__version__}", "good")
    if node.reloader is not None:
        node.reloader.followers.append(lambda _settings: events.add("the node", "settings reloaded", "good"))
    keeper = asyncio.create_task(keep(node, app[HISTORIES], events), name="dashboard history")
    yield
    keeper.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeper


async def _state(request: web.Request) -> web.Response:
    app = request.app
    return _json(node_state(app[NODE], app[HISTORIES].recent, app[EVENTS]))


async def _history(request: web.Request) -> web.Response:
    name = request.query.get("range", "15m")
    history = request.app[HISTORIES].longer.get(name)
    if history is None:
        raise BadRequest("range: 15m or 24h", param="range")
    return _json({"period_s": history.period_s, **history.series()})


def _json(content: dict[str, Any]) -> web.Response:
    return web.Response(
        body=orjson.dumps(content),
        content_type="application/json",
        charset="utf-8",
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
    )


def page_headers(html: str) -> dict[str, str]:
    """The browser runs the page's own script and style, known by their hashes, and talks to nobody but us."""
    script, style = inline_digest(html, "script"), inline_digest(html, "style")
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def inline_digest(html: str, tag: str) -> str:
    """What a content security policy calls the inline script or style of a page."""
    inline = html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()


def _page_file() -> Path:
    spec = importlib.util.find_spec("backend_client")
    places = spec.submodule_search_locations if spec is not None else None
    page = Path(next(iter(places or ()), "."), "_cli", "dashboard", "page.html")
    if not page.is_file():
        raise ConfigurationError(
            f"the dashboard's page is missing from this installation: {page}; install npu-node again"
        )
    return page
