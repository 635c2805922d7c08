"""The task's route: POST /count."""

import orjson
from aiohttp import web
from pydantic import Field

from counting_task.serving.service import CountingMetrics, count
from worker_node.api.body import Body, read_body
from worker_node.api.context import request_context, route_headers
from worker_node.api.keys import NODE
from worker_node.api.middleware import inference
from worker_node.api.operation import ApiOperation
from worker_node.api.replies import Reply
from worker_node.api.task import TaskApi


class CountBody(Body):
    """Body of POST /count."""

    texts: list[str] = Field(max_length=8)
    model: str | None = None


class Counts(Reply):
    """Reply of POST /count."""

    counts: list[int]
    device: str


async def _count(request):
    context = request_context(request)
    body = await read_body(request, CountBody)
    reply = await count(request.app[NODE].services, context, body.texts, body.model)
    return web.Response(
        body=orjson.dumps({"counts": reply.counts, "device": reply.route.device}),
        content_type="application/json",
        headers=route_headers(reply.route, reply.busy_us, shared=reply.busy_shared),
    )


API = TaskApi(
    routes=lambda: [web.post("/count", inference(_count))],
    operations=(
        ApiOperation("post", "/count", "Count vowels", {"application/json": Counts}, CountBody, inference=True),
    ),
    metrics=lambda telemetry: telemetry.own(CountingMetrics),
)
