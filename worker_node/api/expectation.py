"""Answers the Expect header before any handler runs, in the error format of the path."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from worker_node.api.dialects import renderer
from worker_node.api.middleware import note_failure
from worker_node.core.errors import BadRequest

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def answering_expectations(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """The same routes; aiohttp by itself refuses unknown expectations in plain text."""
    return [
        web.RouteDef(route.method, route.path, route.handler, {**route.kwargs, "expect_handler": _expect})
        for route in routes
    ]


async def _expect(request: web.Request) -> web.StreamResponse | None:
    if request.version < (1, 1):
        return None  # to be ignored there
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0
        return None
    error = BadRequest("the only expectation that is met is Expect: 100-continue")
    note_failure(request, error)
    response = renderer(request.path)(error)
    response.force_close()
    return response
