"""POST /v1/responses: the answer as items, whole or as events; stored for later turns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from worker_node.api.body import read_body
from worker_node.api.busy import busy_fields
from worker_node.api.context import request_context, route_headers
from worker_node.api.keys import NODE
from worker_node.api.middleware import inference
from worker_node.api.openai.errors import describe_error
from worker_node.api.sse import EventStream
from worker_node.core.errors import NodeError
from worker_node.core.types import Finished, FinishReason, Route
from worker_node.tasks.generate.api.openai.items import Items
from worker_node.tasks.generate.api.openai.reply import new_id
from worker_node.tasks.generate.api.openai.responses_body import ResponsesBody
from worker_node.tasks.generate.api.openai.responses_stored import Conversation
from worker_node.tasks.generate.serving.service import GenerationRun, generate


def routes() -> list[web.RouteDef]:
    """The routes of this file."""
    return [web.post("/v1/responses", inference(_responses))]


async def _responses(request: web.Request) -> web.StreamResponse:
    context = request_context(request)
    body = await read_body(request, ResponsesBody)
    conversation = Conversation(request, body)
    wanted = body.request(context, conversation.items)
    async with generate(request.app[NODE].services, wanted, whole=not body.stream) as run:
        response = _Response(body, run.route, stored=conversation.stored)
        if body.stream:
            return await _stream(request, run, response, conversation)
        items = Items()
        async for event in run.events:
            if isinstance(event, Finished):
                finished = event
                items.end(_status(event))
            else:
                items.add(event)
    whole = response.ended(items, finished)
    conversation.begin(whole)
    return web.Response(
        body=orjson.dumps(whole),
        content_type="application/json",
        charset="utf-8",
        headers=route_headers(run.route, finished.npu_busy_delta_us, shared=finished.npu_busy_shared),
    )


async def _stream(
    request: web.Request, run: GenerationRun, response: _Response, conversation: Conversation
) -> web.StreamResponse:
    items, number = Items(), 0
    conversation.begin(response.begun())
    ended = False

    def end(whole: dict[str, Any]) -> dict[str, Any]:
        """Store how it ended: before the client hears of it, who may refer to it at once."""
        nonlocal ended
        ended = True
        conversation.end(whole)
        return whole

    try:
        async with EventStream(request, route_headers(run.head())) as stream:

            async def send(kind: str, **fields: Any) -> None:
                nonlocal number
                await stream.send({"type": kind, "sequence_number": number, **fields}, kind)
                number += 1

            try:
                for kind in ("response.created", "response.in_progress"):
                    await send(kind, response=response.begun())
                async for event in run.events:
                    if not isinstance(event, Finished):
                        for kind, fields in items.add(event):
                            await send(kind, **fields)
                        continue
                    last = items.end(_status(event))
                    whole = end(response.ended(items, event))
                    for kind, fields in last:
                        await send(kind, **fields)
                    await send(f"response.{whole['status']}", response=whole)
            except NodeError as error:
                stream.failed(error)
                problem = describe_error(error)
                items.end("incomplete")
                await send("response.failed", response=end(response.stopped(items, "failed", problem)))
                await send("error", code=problem["code"], message=problem["message"], param=problem["param"])
    finally:
        if not ended:
            items.end("incomplete")
            end(response.stopped(items, "cancelled"))
    return stream.response


def _status(finished: Finished) -> str:
    """How the last item of an answer ended, and so the whole."""
    return "incomplete" if finished.finish_reason is FinishReason.LENGTH else "completed"


class _Response:
    """The object around the items: what was asked for, and how it ended."""

    def __init__(self, body: ResponsesBody, route: Route, *, stored: bool) -> None:
        self._fields: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": route.model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": stored,
            "temperature": body.temperature or 0.0,
            "text": body.text.model_dump(by_alias=True, exclude_none=True)
            if body.text
            else {"format": {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.model_dump()["tool_choice"],
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
        }

    def begun(self) -> dict[str, Any]:
        """The object before there is an answer."""
        return {**self._fields, "status": "in_progress", "output": [], "usage": None}

    def stopped(self, items: Items, status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The object of an answer that was `cancelled` or has `failed`, with the items there are."""
        problem = None if error is None else {"code": error["code"], "message": error["message"]}
        return {**self._fields, "status": status, "error": problem, "output": items.output, "usage": None}

    def ended(self, items: Items, finished: Finished) -> dict[str, Any]:
        """The object with the whole answer."""
        status, usage = _status(finished), finished.usage
        return {
            **self._fields,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": items.output,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
            **busy_fields([finished]),
        }
