"""Pages for people with a browser: what the node is, and its API. They show nothing of this node's models or work."""

from __future__ import annotations

import asyncio
import functools
import struct
import zlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from aiohttp import web

from worker_node.http.dashboard import inline_digest
from worker_node.http.openapi import document

_SIZE = 16
_INK, _CLEAR = b"\x0b\x62\xb0\xff", b"\x00\x00\x00\x00"


def _is_ink(x: int, y: int) -> bool:
    """A square with a hole, and three pins on each side."""
    inside = 3 <= x <= 12 and 3 <= y <= 12
    hole = 6 <= x <= 9 and 6 <= y <= 9
    pins = (x in {4, 7, 10} and y not in {0, 15}) or (y in {4, 7, 10} and x not in {0, 15})
    return (inside and not hole) or (not inside and pins)


def _png() -> bytes:
    rows = b"".join(b"\0" + b"".join(_INK if _is_ink(x, y) else _CLEAR for x in range(_SIZE)) for y in range(_SIZE))
    head = struct.pack(">IIBBBBB", _SIZE, _SIZE, 8, 6, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _ico(png: bytes) -> bytes:
    return struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", _SIZE, _SIZE, 0, 0, 1, 32, len(png), 22) + png


ICON = _ico(_png())


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


def layout_document(title: str, body: str) -> web.Response:
    """A page; `body` is HTML. The browser runs no script and loads nothing from elsewhere."""
    html = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="/favicon.ico">'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>"
    )
    return web.Response(
        text=html,
        content_type="text/html",
        headers={
            "Content-Security-Policy": (
                f"default-src 'none'; style-src '{inline_digest(html, 'style')}'; img-src 'self'; base-uri 'none'; "
                "form-action 'none'; frame-ancestors 'none'"
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


_Json = Mapping[str, Any]
_METHODS = ("get", "post", "delete")


def reference() -> str:
    """The body of the page: every operation, and every schema that one of them names."""
    spec = document()
    schemas: _Json = spec["components"]["schemas"]
    return "".join(
        [
            "<h1>API reference</h1>",
            '<p><a href="/">This node</a> · <a href="/dashboard">dashboard</a> · ',
            '<a href="/openapi.json">openapi.json</a>, the same for programs</p>',
            '<p class="note">Keys are sent as <code>Authorization: Bearer KEY</code>, where the node has any.</p>',
            *_operations(spec["paths"]),
            '<h2 id="schemas">Schemas</h2>',
            *(_schema(name, schema) for name, schema in sorted(schemas.items())),
        ]
    )


def _operations(paths: _Json) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_group(path), []).append(path)
    for group, members in groups.items():
        yield f"<h2>{escape(group)}</h2>"
        for path in members:
            yield from (_operation(method, path, paths[path][method]) for method in _METHODS if method in paths[path])


def _group(path: str) -> str:
    """The dialect, or part of the API, that a path belongs to."""
    starts = {"/v1/": "OpenAI's API", "/api/": "Ollama's API", "/models": "Models", "/admin/": "Administration"}
    return next((name for start, name in starts.items() if path.startswith(start)), "The node")


def _operation(method: str, path: str, operation: _Json) -> str:
    body = operation.get("requestBody", {}).get("content", {})
    parts = [
        f'<details><summary><span class="method">{method.upper()}</span> <code>{escape(path)}</code> '
        f"{escape(operation.get('summary', ''))}</summary>"
    ]
    if operation.get("security") == []:
        parts.append('<p class="note">Needs no key.</p>')
    if parameters := operation.get("parameters"):
        names = ", ".join(f"<code>{escape(item['name'])}</code> ({escape(item['in'])})" for item in parameters)
        parts.append(f"<p>Parameters: {names}</p>")
    parts += [f"<p>Body, {escape(kind)}: {_type(content['schema'])}</p>" for kind, content in body.items()]
    rows = "".join(
        f"<tr><td>{escape(status)}</td><td>{escape(answer['description'])}</td><td>{_contents(answer)}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    return "".join([*parts, f"<table>{rows}</table></details>"])


def _contents(answer: _Json) -> str:
    return ", ".join(
        f"{escape(kind)} {_type(content['schema']) if content.get('schema') else ''}"
        for kind, content in answer.get("content", {}).items()
    )


def _schema(name: str, schema: _Json) -> str:
    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' *' if field in required else ''}</td><td>{_type(part)}</td>"
        f"<td>{_note(part)}</td></tr>"
        for field, part in schema.get("properties", {}).items()
    )
    about = f"<p>{escape(schema['description'])}</p>" if schema.get("description") else ""
    return f'<h3 id="{escape(name)}">{escape(name)}</h3>{about}' + (
        f"<table>{rows}</table>" if rows else f"<p>{_type({**schema, 'description': ''})}</p>"
    )


def _note(part: _Json) -> str:
    default = f" default {part['default']!r}" if part.get("default") is not None else ""
    return escape(f"{part.get('description', '')}{default}".strip())


def _type(schema: Any) -> str:
    """A type in words; a named one links to its schema."""
    if not isinstance(schema, Mapping):
        return "anything"
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(_type(part) for part in schema[word]))
    if values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return ", ".join(f"<code>{escape(str(value))}</code>" for value in values)
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"array of {_type(schema.get('items'))}"
    return escape(" or ".join(kind) if isinstance(kind, list) else str(kind))


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
    return [web.get("/", _front), web.get("/docs", _docs), web.get("/favicon.ico", _icon)]


async def _front(request: web.Request) -> web.Response:
    if not _is_browser(request):
        # Ollama's clients look for this.
        return web.Response(text="Ollama is running", headers={"Vary": "Accept"})
    origin = escape(f"{request.scheme}://{request.host}")
    response = layout_document("npu-node", _FRONT.replace("ORIGIN", origin))
    response.headers["Vary"] = "Accept"
    return response


def _is_browser(request: web.Request) -> bool:
    """Whether the request asks for HTML by name: programs send `*/*` or nothing."""
    accepted = (item.partition(";")[0].strip().lower() for item in request.headers.get("Accept", "").split(","))
    return "text/html" in accepted


async def _docs(_request: web.Request) -> web.Response:
    # The first time it takes the event loop too long.
    return layout_document("npu-node: API reference", await asyncio.to_thread(_reference))


@functools.cache
def _reference() -> str:
    return reference()


async def _icon(_request: web.Request) -> web.Response:
    return web.Response(body=ICON, content_type="image/x-icon", headers={"Cache-Control": "max-age=86400"})
