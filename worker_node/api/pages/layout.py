"""The frame of the pages: one document without scripts, whose style the browser knows by its hash."""

from __future__ import annotations

from aiohttp import web

from worker_node.api.dashboard.page import inline_digest

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


def document(title: str, body: str) -> web.Response:
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
