"""Scripted nodes on real sockets."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from backend_client.testing.answers import NOT_FOUND, Answer, event_bytes
from backend_client.testing.node import PATHS, FakeNode
from backend_client.testing.steps import Step


def application(node: FakeNode) -> web.Application:
    """The routes of a node."""

    async def health(_: web.Request) -> web.Response:
        return _whole(node.health())

    async def take(request: web.Request) -> web.StreamResponse:
        step, answer = node.take(request.path, request.headers, await request.read())
        if step is not None and step.kind == "hang":
            await asyncio.get_running_loop().create_future()
        if step is not None and step.kind == "drop" and request.transport is not None:
            request.transport.abort()
        return _whole(answer) if answer.events is None else await _stream(request, answer, step)

    async def unknown(_: web.Request) -> web.Response:
        return _whole(NOT_FOUND)

    app = web.Application(client_max_size=256 * 1024 * 1024)
    app.add_routes([web.get("/health", health), *(web.post(path, take) for path in PATHS)])
    app.add_routes([web.post("/{path:.*}", unknown)])
    return app


def _whole(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)


async def _stream(request: web.Request, answer: Answer, step: Step | None) -> web.StreamResponse:
    response = web.StreamResponse(headers=answer.headers)
    # The caller may leave at any time, as callers of nodes do.
    with contextlib.suppress(ConnectionResetError):
        await response.prepare(request)
        for index, (name, data) in enumerate(answer.events or ()):
            if step is not None and step.kind == "cut" and index == step.after and request.transport is not None:
                request.transport.abort()
                return response
            await response.write(event_bytes(name, data))
        await response.write_eof()
    return response
