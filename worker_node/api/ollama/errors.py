"""Errors as Ollama's clients read them: `{"error": "…"}`."""

from __future__ import annotations

import orjson
from aiohttp import web

from worker_node.api.errors import retry_headers
from worker_node.core.errors import ModelNotFound, NodeError, Overloaded

BUSY = "server busy, please try again. maximum pending requests exceeded"


def message(error: NodeError) -> str:
    """The text of an error; clients know a full queue by its wording."""
    return BUSY if isinstance(error, Overloaded) else error.message


def not_found(name: str) -> ModelNotFound:
    """The error for a name that no model has, in the words that clients look for before they pull."""
    return ModelNotFound(f"model {name[:200]!r} not found", param="model")


def ollama_error_response(error: NodeError) -> web.Response:
    """The reply to a request that failed. A full queue is 503 here."""
    return web.Response(
        status=503 if isinstance(error, Overloaded) else error.status,
        body=orjson.dumps({"error": message(error)}),
        content_type="application/json",
        charset="utf-8",
        headers=retry_headers(error),
    )
