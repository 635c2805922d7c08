"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from worker_node.api.keys import NODE
from worker_node.manager.served import ServedModel


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    # An id may hold slashes: organisation/model.
    return [web.get("/v1/models", _list), web.get(r"/v1/models/{id:.+}", _one)]


async def _list(request: web.Request) -> web.Response:
    node = request.app[NODE]
    return _json({"object": "list", "data": [_model(model) for model in node.manager.models]})


async def _one(request: web.Request) -> web.Response:
    node = request.app[NODE]
    return _json(_model(node.manager.find(request.match_info["id"])))


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        # When it was installed here.
        "created": int(model.installed.installed_at),
        "owned_by": "npu-node",
        "kind": model.installed.kind,
        "context_limit": model.installed.context_limit,
    }


def _json(data: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(data), content_type="application/json", charset="utf-8")
