"""The bounded profile as a process: the same life as any node's, with one model, a few routes and one address."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from worker_node.bounded import http as bounded_jobs
from worker_node.bounded.model import build, choose_model, reservation
from worker_node.bounded.service import JobService
from worker_node.bounded.settings import BoundedSettings, DeviceLock
from worker_node.http.access import OriginPolicy, guard_origins
from worker_node.http.connection import admit_connection
from worker_node.http.middleware import before_each_head, errors_as, hide_versions, log_requests, note_head
from worker_node.http.request_state import NODE
from worker_node.models.store import ModelStore
from worker_node.node import Node
from worker_node.server import Profile, hosted_node, run

log = logging.getLogger(__name__)


async def run_sidecar(settings: BoundedSettings, *, on_listening: Callable[[str, Node], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigurationError for an address that is taken, or any but 127.0.0.1.

    A model that is missing does not keep it from starting: /healthz and every job then say what is missing.
    """
    profile = _Parts(settings, examined=True).profile()
    await run(settings.node_settings(), profile, on_listening=on_listening)


@asynccontextmanager
async def job_service(settings: BoundedSettings) -> AsyncIterator[JobService]:
    """The service without HTTP, for a command. Its engine answers no known question first: every generation counts.

    Raises ConfigurationError.
    """
    parts = _Parts(settings, examined=False)
    async with hosted_node(settings.node_settings(), parts.profile()) as node:
        yield parts.service(node)


class _Parts:
    """What the models and the service share: the choice of the model, and the lock."""

    def __init__(self, settings: BoundedSettings, *, examined: bool) -> None:
        self._settings = settings
        self._examined = examined
        self._choice = choose_model(settings.model, ModelStore())
        self._lock = DeviceLock(settings.lock, settings.lock_wait_s)
        log.info("the model is %s (%s)", self._choice.path, self._choice.why)
        if (problem := reservation(self._choice)) is not None:
            log.warning("%s", problem)

    def profile(self) -> Profile:
        return Profile(
            lambda machine: build(self._choice, machine, self._lock, self._settings.blobs, examined=self._examined),
            lambda node: _app(node, self.service(node)),
            bounded_jobs.job_error_response,
            starts_parts=False,
        )

    def service(self, node: Node) -> JobService:
        return JobService(
            services=node.services,
            choice=self._choice,
            npu=node.npu,
            lock=self._lock,
            cache_dir=str(self._settings.cache.expanduser()),
            timeout_s=node.settings.request_timeout_s,
            load_timeout_s=node.settings.load_timeout_s,
        )


def _app(node: Node, service: JobService) -> web.Application:
    """Return the application of the bounded profile: its own routes and nothing else."""
    # The log has method, path, status and time alone: a request has no id, least of all one that its caller wrote.
    log_request = log_requests(lambda _request: "-")
    render = errors_as(
        lambda _path: bounded_jobs.job_error_response, admit_connection, guard_origins(OriginPolicy("127.0.0.1"))
    )
    app = web.Application(middlewares=[log_request, render])
    app[NODE] = node
    app[bounded_jobs.SERVICE] = service
    app.on_response_prepare.append(before_each_head(note_head, hide_versions))
    app.add_routes(bounded_jobs.routes())
    return app
