"""The bounded jobs dialect (spec: bounded-jobs): its routes and its form of errors."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from worker_node.bounded.jobs import JOBS, MAX_INPUT_CHARACTERS, parse_request
from worker_node.bounded.service import JobService
from worker_node.core.errors import NodeError, RouteNotFound
from worker_node.http.body import read_bytes
from worker_node.http.errors import retry_headers
from worker_node.http.middleware import Handler, inference
from worker_node.http.replies import json_response

SERVICE = web.AppKey("service", JobService)
# The contract knows one status for everything that another try may mend, and one for requests of web pages.
_STATUS = {403: 400, 429: 503, 504: 503}


def routes() -> list[web.RouteDef]:
    return [
        web.get("/healthz", _healthz),
        web.get("/models", _models),
        web.post("/v1/worker/generate", _generates(None)),
        web.post("/v1/worker/extract-memory-candidates", _generates("memory_candidate")),
        web.post("/v1/worker/condense-notification", _generates("notification")),
    ]


def job_error_response(error: NodeError) -> web.Response:
    """An error in the form of the contract: `{"error": "…"}`."""
    status = _STATUS.get(error.status, error.status)
    message = "not found" if isinstance(error, RouteNotFound) else error.message
    return json_response({"error": message}, status, retry_headers(error))


async def _healthz(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    busy = service.busy_time()
    problem = service.problem()
    reasons = {"busy_time_us": busy.reason} if busy.value is None else {}
    body: dict[str, Any] = {
        "ok": problem is None,
        "model": service.model_id,
        "model_path": str(service.choice.path),
        "model_choice": service.choice.why,
        "device": "NPU",
        "cache_dir": service.cache_dir,
        "cache_exists": service.cache_exists(),
        "loaded": service.loaded,
        "initial_load_ms": service.initial_load_ms,
        "busy_time_us": busy.value,
        "max_input_chars": MAX_INPUT_CHARACTERS,
        "jobs": sorted(JOBS),
        "bind": _bind(request),
    }
    if problem is not None:
        reasons["ok"] = problem
    if reasons:
        body["reasons"] = reasons
    return json_response(body | service.label(), 200 if problem is None else 503)


async def _models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    model = {
        "id": service.model_id,
        "path": str(service.choice.path),
        "device": "NPU",
        "loaded": service.loaded,
    }
    return json_response({"models": [model | service.label()]})


def _generates(implied: str | None) -> Handler:
    @inference
    async def generate(request: web.Request) -> web.Response:
        wanted = parse_request(await read_bytes(request), implied)
        result = await request.app[SERVICE].run(wanted)
        if result.error is None:
            return json_response(result.payload)
        return json_response(result.payload | {"error": result.error}, 503)

    return generate


def _bind(request: web.Request) -> str | None:
    """The local address of the connection."""
    name = None if request.transport is None else request.transport.get_extra_info("sockname")
    return None if name is None else f"{name[0]}:{name[1]}"
