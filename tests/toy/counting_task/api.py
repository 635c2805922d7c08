"""The task's routes: POST /count and GET /count/tally."""

import orjson
from aiohttp import web
from pydantic import Field

from counting_task.serving.service import CountingMetrics, count
from counting_task.serving.tally import tally
from worker_node.http.body import Body, read_body
from worker_node.http.context import request_context, route_headers
from worker_node.http.replies import Reply
from worker_node.http.request_state import NODE
from worker_node.http.task import ApiOperation, TaskApi


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


PREPARED = web.AppKey("prepared by the counting task", str)


def _prepare(app, node):
    app[PREPARED] = f"for {node.settings.host}"


async def _tally(request):
    started = request.app[NODE].services.parts.of(tally).started
    return web.json_response({"started": started, "prepared": request.app[PREPARED]})


API = TaskApi(
    operations=(
        ApiOperation("post", "/count", _count, "Count vowels", {"application/json": Counts}, CountBody, inference=True),
        ApiOperation("get", "/count/tally", _tally, "What the task started with", {"application/json": None}),
    ),
    prepare=_prepare,
    metrics=lambda telemetry: telemetry.own(CountingMetrics),
)
