"""The task's route: POST /count."""

import orjson
from aiohttp import web
from pydantic import Field

from counting_task.serving.service import CountingMetrics, count
from worker_node.http.body import Body, read_body
from worker_node.http.context import NODE, request_context, route_headers
from worker_node.http.replies import Reply
from worker_node.http.routes import ApiOperation, TaskApi


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
    result, route = await count(request.app[NODE].services, context, body.texts, body.model)
    return web.Response(
        body=orjson.dumps({"counts": result.counts, "device": route.device}),
        content_type="application/json",
        headers=route_headers(route, result.busy),
    )


API = TaskApi(
    operations=(
        ApiOperation("post", "/count", _count, "Count vowels", {"application/json": Counts}, CountBody, inference=True),
    ),
    metrics=CountingMetrics,
)
