"""POST /route/explain: where a request of any dialect would run now, and why; nothing is loaded or run.

The request goes to the handler of its own path, as a real one would, and stops where the placement is decided. So every
dialect is explained by the code that serves it."""

from __future__ import annotations

from typing import Any, ClassVar

import orjson
from aiohttp import web
from multidict import CIMultiDict
from pydantic import Field

from worker_node.core.errors import BadRequest
from worker_node.http.body import Body, read_body
from worker_node.http.errors import describe
from worker_node.http.middleware import is_inference
from worker_node.http.replies import ExplanationReply, json_response
from worker_node.http.request_state import STATE, DryRun
from worker_node.http.task import JSON, ApiOperation, Handler
from worker_node.manager.placement import Placement
from worker_node.serving.routing import Demand, Explained, Explanation, PlacementStatus


class ExplainBody(Body):
    """Body of POST /route/explain: the request to explain."""

    takes_images: ClassVar[bool] = True

    path: str = Field(max_length=256)
    body: dict[str, Any]
    headers: dict[str, str] = Field(default_factory=dict)


async def _explain(request: web.Request) -> web.Response:
    wanted = await read_body(request, ExplainBody)
    handler = _handler(request.app, wanted.path)
    request[STATE].dry_run = DryRun(orjson.dumps(wanted.body), CIMultiDict(wanted.headers))
    try:
        await handler(request)
    except Explained as explained:
        return json_response(_render(wanted.path, explained.explanation))
    raise BadRequest("this request is answered without a device: there is no route to explain", param="body")


def _handler(app: web.Application, path: str) -> Handler:
    """The handler of inference requests at a path. Raises BadRequest, listing the paths, when there is none."""
    handlers = {
        route.resource.canonical: route.handler
        for route in app.router.routes()
        if route.resource is not None and route.method == "POST" and is_inference(route.handler)
    }
    if path not in handlers:
        raise BadRequest(f"path must be one of {', '.join(sorted(handlers))}", param="path")
    return handlers[path]


def _render(path: str, explanation: Explanation) -> dict[str, Any]:
    demand, decision, route = explanation.demand, explanation.decision, explanation.route
    return {
        "path": path,
        "model": demand.model,
        "token_count": demand.token_count,
        "prompt_tokens": demand.prompt_tokens,
        "min_new_tokens": demand.min_new_tokens,
        "needs": sorted(demand.needs),
        "require_device": demand.require,
        "device": None if route is None else route.device,
        "reason": None if route is None else route.reason,
        "emulated": route is not None and route.emulated,
        "loads": decision.wait_until is not None,
        "refusal": None if decision.error is None else describe(decision.error),
        "placements": [
            _placement(demand, placement, status)
            for placement, status in zip(demand.placements, decision.considered, strict=True)
        ],
    }


def _placement(demand: Demand, placement: Placement, status: PlacementStatus) -> dict[str, Any]:
    return {
        "device": status.device,
        "emulated": placement.emulated,
        "on_demand": placement.on_demand,
        "prompt_limit": status.prompt_limit,
        "total_limit": status.total_limit,
        "holds": status.holds(demand),
        "lacks": sorted(status.lacks),
        "obstacle": status.obstacle,
        "detail": status.detail,
        "retry_after_s": status.retry_after,
    }


OPERATIONS = (
    ApiOperation(
        "post", "/route/explain", _explain, "Where a request would run", {JSON: ExplanationReply}, ExplainBody
    ),
)
