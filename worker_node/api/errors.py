"""Errors as the native API renders them."""

from __future__ import annotations

import math

import orjson
from aiohttp import web

from worker_node.core.errors import NodeError


def error_body(error: NodeError) -> bytes:
    """The JSON of an error: `{"error": {"message", "type", "code", "param"}}`."""
    return orjson.dumps({"error": describe(error)})


def describe(error: NodeError) -> dict[str, str | None]:
    """The four fields of an error."""
    return {"message": error.message, "type": error.type, "code": error.code, "param": error.param}


def retry_headers(error: NodeError) -> dict[str, str]:
    """`Retry-After` (whole seconds, rounded up) and `retry-after-ms`, where another try may help."""
    if error.retry_after is None:
        return {}
    return {
        "Retry-After": str(max(1, math.ceil(error.retry_after))),
        "retry-after-ms": str(max(1, round(error.retry_after * 1000))),
    }


def error_response(error: NodeError, fields: object = None) -> web.Response:
    """The reply to a request that failed; `fields` is what stands under `error` where a dialect has its own form."""
    return web.Response(
        status=error.status,
        body=error_body(error) if fields is None else orjson.dumps({"error": fields}),
        content_type="application/json",
        charset="utf-8",
        headers=retry_headers(error),
    )
