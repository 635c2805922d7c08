"""Administration of the running node: /admin."""

from __future__ import annotations

from dataclasses import asdict

import orjson
from aiohttp import web

from worker_node.core.errors import BadRequest, ConfigurationError, NotOffered
from worker_node.http.leniency import NODE

# POST /admin/reload: read the settings again and apply them model by model.


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [web.post("/admin/reload", _reload)]


async def _reload(request: web.Request) -> web.Response:
    reloader = request.app[NODE].reloader
    if reloader is None:
        raise NotOffered("this node was not started from settings that could be read again")
    try:
        report = await reloader.reload()
    except ConfigurationError as error:
        raise BadRequest(f"nothing was changed: {error.message}") from error
    return web.Response(body=orjson.dumps(asdict(report)), content_type="application/json", charset="utf-8")
