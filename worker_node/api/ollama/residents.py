"""The model that a request names: found, in memory, and for how long that took."""

from __future__ import annotations

from aiohttp import web

from worker_node.api.arrival import deadline_of
from worker_node.api.keys import NODE
from worker_node.api.ollama.errors import not_found
from worker_node.api.ollama.frames import Loading
from worker_node.core.errors import ModelNotFound
from worker_node.core.types import RequestContext
from worker_node.manager.served import ServedModel


async def served(request: web.Request, name: str) -> ServedModel:
    """The model of that name. Raises as `ModelManager.resolve`, ModelNotFound in Ollama's words."""
    try:
        return await request.app[NODE].manager.resolve(name, deadline_of(request))
    except ModelNotFound:
        raise not_found(name) from None


async def resident(request: web.Request, name: str, context: RequestContext) -> tuple[ServedModel, Loading]:
    """The model of that name, loaded for nothing in particular. Raises ModelNotFound, DeadlineExceeded."""
    model = await served(request, name)
    return model, Loading(await request.app[NODE].manager.load(model, context.deadline))
