"""GET / (in a browser), GET /docs, GET /favicon.ico."""

from __future__ import annotations

import asyncio
import functools
from html import escape

from aiohttp import web

from worker_node.api.pages.icon import ICON
from worker_node.api.pages.layout import document
from worker_node.api.pages.reference import reference

_FRONT = """
<h1>npu-node</h1>
<p>An inference node for Intel NPUs: embeddings and text generation over a native API, OpenAI's and Ollama's.</p>
<ul>
<li><a href="/dashboard">Dashboard</a>: models, devices, load and errors, live</li>
<li><a href="/docs">API reference</a> (<a href="/openapi.json">openapi.json</a>)</li>
<li><a href="/health">Health</a> and <a href="/v1/models">models</a></li>
<li><a href="/metrics">Metrics</a> for Prometheus</li>
</ul>
<h2>Try it</h2>
<pre>curl ORIGIN/embeddings -d '{"texts": ["hello", "world"]}'
curl ORIGIN/inference  -d '{"prompt": "What is the capital of France?", "max_new_tokens": 40}'</pre>
<p>OpenAI clients: base URL <code>ORIGIN/v1</code>. Ollama clients: <code>ORIGIN</code>.
Where the node has API keys, send one as <code>Authorization: Bearer KEY</code>.</p>
"""


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [web.get("/", _front), web.get("/docs", _docs), web.get("/favicon.ico", _icon)]


async def _front(request: web.Request) -> web.Response:
    if not _is_browser(request):
        # Ollama's clients look for this.
        return web.Response(text="Ollama is running", headers={"Vary": "Accept"})
    origin = escape(f"{request.scheme}://{request.host}")
    response = document("npu-node", _FRONT.replace("ORIGIN", origin))
    response.headers["Vary"] = "Accept"
    return response


def _is_browser(request: web.Request) -> bool:
    """Whether the request asks for HTML by name: programs send `*/*` or nothing."""
    accepted = (item.partition(";")[0].strip().lower() for item in request.headers.get("Accept", "").split(","))
    return "text/html" in accepted


async def _docs(_request: web.Request) -> web.Response:
    # The first time it takes the event loop too long.
    return document("npu-node: API reference", await asyncio.to_thread(_reference))


@functools.cache
def _reference() -> str:
    return reference()


async def _icon(_request: web.Request) -> web.Response:
    return web.Response(body=ICON, content_type="image/x-icon", headers={"Cache-Control": "max-age=86400"})
