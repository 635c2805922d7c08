"""GET /models and what is done to a model: load, unload, remove."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from worker_node.api.arrival import deadline_of
from worker_node.api.keys import NODE
from worker_node.api.models.describe import describe_installed, describe_served
from worker_node.core.errors import BadRequest, InsufficientMemory
from worker_node.manager.manager import ModelManager
from worker_node.manager.replacement import WhileInUse
from worker_node.manager.served import ServedModel
from worker_node.registry import tasks


def routes() -> list[web.RouteDef]:
    """The routes of this file. An id may hold slashes: organisation/model."""
    return [
        web.get("/models", _list),
        web.get(r"/models/{id:.+}", _one),
        web.post(r"/models/{id:.+}/load", _load),
        web.post(r"/models/{id:.+}/unload", _unload),
        web.delete(r"/models/{id:.+}", _delete),
    ]


async def _list(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    on_disk = await manager.in_store(deadline_of(request))
    served = {model.id for model in manager.models}
    return _json(
        {
            "models": [
                *(describe_served(manager, model) for model in manager.models),
                *(_failed(manager, index) for index in range(len(manager.failed))),
                *(describe_installed(manager, model) for model in on_disk if model.id not in served),
            ]
        }
    )


async def _one(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    name = request.match_info["id"]
    for index, failed in enumerate(manager.failed):
        if failed.answers_to(name):
            return _json(_failed(manager, index))
    return _json(describe_served(manager, await manager.resolve(name, deadline_of(request))))


async def _load(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    model = await manager.resolve(request.match_info["id"], deadline_of(request))
    await manager.insist(model)
    # One turn of the manager tells whether it fits at all.
    await manager.decided()
    if (refusal := model.placements[0].residency.refusal) is not None:
        raise InsufficientMemory(refusal)
    return _state(manager, model)


async def _unload(request: web.Request) -> web.Response:
    manager = request.app[NODE].manager
    model = await manager.resolve(request.match_info["id"], deadline_of(request))
    manager.unload(model)
    await manager.decided()
    return _state(manager, model)


async def _delete(request: web.Request) -> web.Response:
    name = request.match_info["id"]
    force = request.query.get("force", "false").lower()
    if force not in {"true", "false", "1", "0"}:
        raise BadRequest("force is true or false", param="force")
    in_use = WhileInUse.FORCE if force in {"true", "1"} else WhileInUse.REFUSE
    await request.app[NODE].manager.delete(name, in_use, deadline=deadline_of(request))
    return _json({"id": name, "deleted": True})


def _state(manager: ModelManager, model: ServedModel) -> web.Response:
    told = describe_served(manager, model)
    return _json({key: told[key] for key in ("id", "state", "reason", "ready_in_s", "memory")}, 202)


def _failed(manager: ModelManager, index: int) -> dict[str, Any]:
    failed = manager.failed[index]
    task = tasks().get(failed.kind or "")
    return {
        "id": failed.name,
        "aliases": list(failed.aliases),
        "task": failed.kind if task is None else task.verb,
        "state": "failed",
        "reason": failed.reason,
    }


def _json(data: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json", charset="utf-8")
