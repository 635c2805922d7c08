"""The middleware that makes each inference request a part of its caller's trace."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from worker_node.api.keys import STATE
from worker_node.api.middleware import Handler, is_inference
from worker_node.observability.tracing import Tracing


def traced(tracing: Tracing) -> Middleware:
    """Trace inference requests; health, metrics and lists are asked for too often to be worth a span."""

    @web.middleware
    async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = request.match_info.route
        if route.resource is None or not is_inference(route.handler):
            return await handler(request)
        state, template = request[STATE], route.resource.canonical
        with tracing.request(request.method, template, request.headers, state.id, state.arrived) as served:
            response = await handler(request)
            served.responded(response.status)
            return response

    return trace
