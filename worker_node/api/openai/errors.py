"""Errors as OpenAI's clients read them: the native form, with OpenAI's codes and its word on retrying."""

from __future__ import annotations

from aiohttp import web

from worker_node.api.errors import describe, error_response
from worker_node.core.errors import NodeError

_CODES = {"overloaded": "rate_limit_exceeded"}


def describe_error(error: NodeError) -> dict[str, str | None]:
    """The four fields of an error, with the code that OpenAI has for it."""
    fields = describe(error)
    return fields | {"code": _CODES.get(error.code, error.code)}


def openai_error_response(error: NodeError) -> web.Response:
    """The reply to a request that failed.

    `x-should-retry` keeps the SDK, which would retry every 408, 409, 429 and 5xx, from repeating what cannot succeed.
    """
    response = error_response(error, describe_error(error))
    response.headers["x-should-retry"] = "true" if error.retry_after is not None else "false"
    return response
