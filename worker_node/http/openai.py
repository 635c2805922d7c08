"""The OpenAI-compatible dialect under /v1 (spec: dialects)."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from worker_node.http.body import deadline_of
from worker_node.http.leniency import NODE
from worker_node.http.models import capabilities, chat_first
from worker_node.manager.served import ServedModel
from worker_node.models.manifest import InstalledModel

# GET /v1/models and /v1/models/{id}.


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    # An id may hold slashes: organisation/model.
    return [web.get("/v1/models", _list), web.get(r"/v1/models/{id:.+}", _one)]


async def _list(request: web.Request) -> web.Response:
    node = request.app[NODE]
    served = {model.id: model for model in node.manager.models}
    usable = chat_first(await node.manager.installed(deadline_of(request)))
    return _json({"object": "list", "data": [_model(model, served.get(model.id)) for model in usable]})


async def _one(request: web.Request) -> web.Response:
    node = request.app[NODE]
    model = await node.manager.resolve(request.match_info["id"], deadline_of(request))
    return _json(_model(model.installed, model))


def _model(model: InstalledModel, served: ServedModel | None) -> dict[str, Any]:
    return {
        "id": model.id,
        "object": "model",
        # When it was installed here.
        "created": int(model.installed_at),
        "owned_by": "npu-node",
        "kind": model.kind,
        "capabilities": capabilities(model, served),
        "context_limit": model.context_limit,
        # One that is not is loaded by the first request for it.
        "loaded": served is not None and served.serving() is not None,
    }


def _json(data: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(data), content_type="application/json", charset="utf-8")
