"""Pages for people with a browser: what the node is, its API, the dashboard and the playground.

The pages themselves show nothing of this node's models or work.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import importlib.util
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from worker_node.core.errors import ConfigurationError
from worker_node.http.routes import DESCRIBED, HTML, TEXT, ApiOperation, document

_SVG = "image/svg+xml"
# A square with a hole, and three pins on each side.
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16" fill="none" stroke="#0b62b0">'
    '<rect x="4.5" y="4.5" width="7" height="7" stroke-width="3"/>'
    '<path d="M4.5 1v14M7.5 1v2M7.5 13v2M10.5 1v14M1 4.5h14M1 7.5h2M13 7.5h2M1 10.5h14"/></svg>'
)


_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881;--link:#0b62b0}
@media (prefers-color-scheme:dark){:root{--link:#7cb8f2}}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.5rem;margin:0 0 .5rem}h2{font-size:1.15rem;margin:2rem 0 .5rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
a{color:var(--link)}code,pre{font:13px/1.45 ui-monospace,monospace}code{overflow-wrap:anywhere}
pre{background:var(--soft);padding:.7rem;overflow-x:auto;border-radius:4px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;vertical-align:top;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line)}
details{border:1px solid var(--line);border-radius:4px;margin:.4rem 0;padding:.35rem .7rem}
summary{cursor:pointer}.method{display:inline-block;min-width:4.2rem;font-weight:600}
.note{opacity:.75}
"""


def _layout(title: str, body: str) -> web.Response:
    """A page; `body` is HTML. The browser runs no script and loads nothing from elsewhere."""
    html = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="/favicon.ico">'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>"
    )
    return web.Response(text=html, content_type="text/html", headers=page_headers(html, "'self'"))


def page_headers(html: str, images: str = "data:") -> dict[str, str]:
    """The browser runs the page's own script and style, known by their hashes, and talks to nobody but us."""
    digests = []
    for tag in ("script", "style"):
        inline = html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digests.append(base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode())
    policy = (
        f"default-src 'none'; script-src 'sha256-{digests[0]}'; style-src 'sha256-{digests[1]}'; "
        f"connect-src 'self'; img-src {images}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


@functools.cache
def read_pages() -> dict[str, str]:
    """The dashboard and the playground, by path: files of the client, which shows a whole fleet with them.

    The playground has the dashboard's style, and the part of its script that both need. The files are found by their
    place and read as text: nothing of the client is imported. Raises ConfigurationError when one is missing.
    """
    spec = importlib.util.find_spec("backend_client")
    places = spec.submodule_search_locations if spec is not None else None
    directory = Path(next(iter(places or ()), "."), "cli")
    files = [directory / name for name in ("dashboard.html", "playground.html")]
    if missing := [file for file in files if not file.is_file()]:
        raise ConfigurationError(f"a page is missing from this installation: {missing[0]}; install npu-node again")
    page, playground = (file.read_text(encoding="utf-8") for file in files)
    for tag, end in (("style", "</style>"), ("script", "// --- ")):
        shared = page.partition(f"<{tag}>")[2].partition(end)[0]
        playground = playground.replace(f"<{tag}>", f"<{tag}>{shared}", 1)
    return {"/dashboard": page, "/play": playground}


async def show_page(request: web.Request) -> web.Response:
    html = read_pages()[request.path]
    return web.Response(text=html, content_type="text/html", headers=page_headers(html))


@functools.cache
def _reference(described: tuple[ApiOperation, ...]) -> str:
    spec = document(described)
    operations = (
        _section(f'<span class="method">{method.upper()}</span> <code>{escape(path)}</code> ', operation)
        for path, methods in spec["paths"].items()
        for method, operation in methods.items()
    )
    schemas = (
        _section(f"<code>{escape(name)}</code> ", schema)
        for name, schema in sorted(spec["components"]["schemas"].items())
    )
    return "".join(
        [
            "<h1>API reference</h1>",
            '<p><a href="/">This node</a> · <a href="/dashboard">dashboard</a> · ',
            '<a href="/openapi.json">openapi.json</a>, the same for programs</p>',
            '<p class="note">Keys are sent as <code>Authorization: Bearer KEY</code>, where the node has any.</p>',
            *operations,
            "<h2>Schemas</h2>",
            *schemas,
        ]
    )


def _section(name: str, described: Mapping[str, Any]) -> str:
    summary = escape(described.get("summary") or described.get("description", ""))
    text = escape(orjson.dumps(described, option=orjson.OPT_INDENT_2).decode())
    return f"<details><summary>{name}{summary}</summary><pre>{text}</pre></details>"


_FRONT = """
<h1>npu-node</h1>
<p>An inference node for Intel NPUs: embeddings and text generation over a native API, OpenAI's and Ollama's.</p>
<ul>
<li><a href="/play">Playground</a>: chat, embeddings and more, with the call as curl and Python</li>
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


async def _front(request: web.Request) -> web.Response:
    accepted = request.headers.get("Accept", "").lower().replace(";", ",").split(",")
    if "text/html" not in [item.strip() for item in accepted]:
        # Programs send `*/*` or nothing. Ollama's clients look for this text.
        return web.Response(text="Ollama is running", headers={"Vary": "Accept"})
    origin = escape(f"{request.scheme}://{request.host}")
    response = _layout("npu-node", _FRONT.replace("ORIGIN", origin))
    response.headers["Vary"] = "Accept"
    return response


async def _docs(request: web.Request) -> web.Response:
    # The first time it takes the event loop too long.
    body = await asyncio.to_thread(_reference, request.app[DESCRIBED])
    return _layout("npu-node: API reference", body)


async def _icon(_request: web.Request) -> web.Response:
    return web.Response(text=_ICON, content_type=_SVG, headers={"Cache-Control": "max-age=86400"})


OPERATIONS = (
    ApiOperation("get", "/dashboard", show_page, "The dashboard's page", {HTML: None}, open=True),
    ApiOperation("get", "/play", show_page, "The playground's page", {HTML: None}, open=True),
    ApiOperation("get", "/", _front, "Ollama: it is running; to a browser: links", {TEXT: None, HTML: None}, open=True),
    ApiOperation("get", "/docs", _docs, "This description, for people", {HTML: None}, open=True),
    ApiOperation("get", "/favicon.ico", _icon, "The icon of the pages", {_SVG: None}, open=True),
)
