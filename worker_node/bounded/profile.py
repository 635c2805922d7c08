"""The bounded profile as a process: the life of any node, with one model, a few routes and one address."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from worker_node.bounded.jobs import JOBS, MAX_INPUT_CHARACTERS, parse_request
from worker_node.bounded.service import JobService, build, choose_model, reservation
from worker_node.bounded.settings import BoundedSettings, DeviceLock
from worker_node.core.errors import NodeError, RouteNotFound
from worker_node.http.access import Access
from worker_node.http.body import check_encoding, expect_continue, read_bytes
from worker_node.http.connection import admit_connection
from worker_node.http.context import NODE
from worker_node.http.middleware import begin_reply, errors_as, inference, log_requests
from worker_node.http.replies import json_response, retry_headers
from worker_node.http.routes import Handler
from worker_node.models.store import ModelStore
from worker_node.node import Node
from worker_node.server import Profile, hosted_node, run

log = logging.getLogger(__name__)

SERVICE = web.AppKey("service", JobService)
# The contract knows one status for every error that a retry may help with, and one for requests of web pages.
_STATUS = {403: 400, 429: 503, 504: 503}


async def run_sidecar(settings: BoundedSettings, *, on_listening: Callable[[str, Node], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigurationError for an address that is taken, or any but 127.0.0.1.

    A model that is missing does not keep it from starting: /healthz and every job then say what is missing.
    """
    profile, _ = _profile(settings, examined=True)
    await run(settings.node_settings(), profile, on_listening=on_listening)


@asynccontextmanager
async def job_service(settings: BoundedSettings) -> AsyncIterator[JobService]:
    """The service without HTTP, for a command. Its engine answers no known question first: every generation counts.

    Raises ConfigurationError.
    """
    profile, service = _profile(settings, examined=False)
    async with hosted_node(settings.node_settings(), profile) as node:
        yield service(node)


def _profile(settings: BoundedSettings, *, examined: bool) -> tuple[Profile, Callable[[Node], JobService]]:
    choice = choose_model(settings.model, ModelStore(), settings.weights.split(","))
    lock = DeviceLock(settings.lock, settings.lock_wait_s)
    log.info("the model is %s (%s)", choice.path, choice.why)
    if (problem := reservation(choice)) is not None:
        log.warning("%s", problem)

    def service(node: Node) -> JobService:
        return JobService(node, settings, choice, lock)

    profile = Profile(
        lambda machine: build(choice, machine, lock, settings.blobs, examined=examined),
        lambda node: _app(node, service(node)),
        job_error_response,
        starts_parts=False,
    )
    return profile, service


def _app(node: Node, service: JobService) -> web.Application:
    # The log has method, path, status and time alone: a request has no id, least of all one that its caller wrote.
    log_request = log_requests(lambda _request: "-")
    # Neither the keys nor the names that NPU_NODE_* may admit open this profile.
    closed = node.settings.model_copy(update={"api_keys": (), "allowed_hosts": (), "cors_origins": ()})
    checks = (admit_connection, Access(closed).check_origin, check_encoding)
    render = errors_as(lambda _request: job_error_response, *checks)
    app = web.Application(middlewares=[log_request, render])
    app[NODE] = node
    app[SERVICE] = service
    app.on_response_prepare.append(begin_reply)
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/models", _models)
    for name, implied in (
        ("generate", None),
        ("extract-memory-candidates", "memory_candidate"),
        ("condense-notification", "notification"),
    ):
        app.router.add_post(f"/v1/worker/{name}", _generates(implied), expect_handler=expect_continue)
    return app


def job_error_response(error: NodeError) -> web.Response:
    """An error in the form of the contract: `{"error": "…"}`."""
    status = _STATUS.get(error.status, error.status)
    message = "not found" if isinstance(error, RouteNotFound) else error.message
    return json_response({"error": message}, status, retry_headers(error))


async def _healthz(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    busy = service.npu.busy_time()
    problem = service.problem()
    reasons = {"busy_time_us": busy.reason} if busy.value is None else {}
    local = None if request.transport is None else request.transport.get_extra_info("sockname")
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
        "bind": None if local is None else f"{local[0]}:{local[1]}",
    }
    if problem is not None:
        reasons["ok"] = problem
    if reasons:
        body["reasons"] = reasons
    return json_response(body | service.label(), 200 if problem is None else 503)


async def _models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    model = {"id": service.model_id, "path": str(service.choice.path), "device": "NPU", "loaded": service.loaded}
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
