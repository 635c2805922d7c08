"""Which form an error has at which URL.

A request that never reached a handler (no such URL, wrong key, too large) is answered in the form that the client of
that part of the API understands, so the form follows from the path alone.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from worker_node.api.errors import error_response
from worker_node.api.ollama.errors import ollama_error_response
from worker_node.api.openai.errors import openai_error_response
from worker_node.errors import NodeError

Renderer = Callable[[NodeError], web.Response]

_BY_PREFIX: tuple[tuple[str, Renderer], ...] = (("/v1/", openai_error_response), ("/api/", ollama_error_response))


def renderer(path: str) -> Renderer:
    """The function that makes a reply of an error at this path."""
    return next((render for prefix, render in _BY_PREFIX if path.startswith(prefix)), error_response)
