"""Maps URLs to the form of their errors, and knows the names of request fields.

A request that never reached a handler (no such URL, wrong key, too large) is answered in the form that the clients of
that part of the API understand, so the form follows from the path alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiohttp import web

from worker_node.api.errors import error_response
from worker_node.api.ollama.errors import ollama_error_response
from worker_node.api.ollama.table import OPTIONS
from worker_node.api.openai.accounting import ACCOUNTING
from worker_node.api.openai.errors import openai_error_response
from worker_node.core.errors import NodeError

OPENAI_PREFIX = "/v1/"
# OpenVINO Model Server has OpenAI's routes there.
OVMS_PREFIX = "/v3/"

Renderer = Callable[[NodeError], web.Response]

# Names that a metric may have whatever the task.
SHARED_FIELDS = frozenset((*OPTIONS, *ACCOUNTING))

_BY_PREFIX: tuple[tuple[str, Renderer], ...] = (
    (OPENAI_PREFIX, openai_error_response),
    (OVMS_PREFIX, openai_error_response),
    ("/api/", ollama_error_response),
)


def also_below_v3(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """The routes, and those of OpenAI's dialect once more where clients of OpenVINO Model Server look for them."""
    given = list(routes)
    return given + [
        web.RouteDef(route.method, OVMS_PREFIX + route.path.removeprefix(OPENAI_PREFIX), route.handler, route.kwargs)
        for route in given
        if route.path.startswith(OPENAI_PREFIX)
    ]


def renderer(path: str) -> Renderer:
    """The function that makes a reply of an error at this path."""
    return next((render for prefix, render in _BY_PREFIX if path.startswith(prefix)), error_response)
