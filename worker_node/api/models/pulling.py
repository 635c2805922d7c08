"""POST /models/pull starts a job, GET /models/jobs/{id} follows it; the work is that of /api/pull."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any

import orjson
from aiohttp import web
from pydantic import Field

from worker_node.api.arrival import deadline_of
from worker_node.api.body import Body, read_body
from worker_node.api.errors import describe
from worker_node.api.keys import NODE
from worker_node.api.sse import EventStream
from worker_node.core.errors import InternalError, NodeError, ResponseNotFound
from worker_node.manager.manager import ModelManager

_KEPT = 100


class PullBody(Body):
    """Body of POST /models/pull."""

    name: Annotated[str, Field(min_length=1, max_length=2048)]


class PullJob:
    """One pull; a `Progress`. `state` is running, done or failed."""

    def __init__(self, name: str) -> None:
        self.id = "pull_" + secrets.token_hex(8)
        self.name = name
        self.state = "running"
        self._stage: str | None = None
        self._total: int | None = None
        self._done = 0
        self._error: NodeError | None = None
        self._changed = asyncio.Event()

    def stage(self, name: str, total: int | None = None) -> None:
        """See `models.progress.Progress`."""
        self._stage, self._total, self._done = name, total, 0
        self._notify()

    def update(self, done: int) -> None:
        """See `models.progress.Progress`."""
        self._done = done
        self._notify()

    async def run(self, manager: ModelManager) -> None:
        """Pull, and remember how it ended."""
        try:
            await manager.pull(self.name, self)
            self.state = "done"
        except NodeError as error:
            self.state, self._error = "failed", error
        except Exception:
            self.state, self._error = "failed", InternalError("the pull failed; the node's log says where")
            raise
        finally:
            if self.state == "running":
                self.state = "failed"
            self._notify()

    def told(self) -> dict[str, Any]:
        """The job as replies tell it."""
        return {
            "id": self.id,
            "name": self.name,
            "state": self.state,
            "stage": self._stage,
            "completed": self._done,
            "total": self._total,
            "error": None if self._error is None else describe(self._error),
        }

    async def changes(self) -> AsyncIterator[dict[str, Any]]:
        """The job now and after each change, until it has ended; of several changes the reader gets the latest."""
        while True:
            changed = self._changed
            yield self.told()
            if self.state != "running":
                return
            await changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class PullJobs:
    """The jobs of one node; of those that have ended, the latest are kept."""

    def __init__(self) -> None:
        self._jobs: dict[str, PullJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, manager: ModelManager, name: str) -> PullJob:
        """Begin to pull."""
        ended = [job.id for job in self._jobs.values() if job.state != "running"]
        for old in itertools.islice(ended, max(0, len(self._jobs) - _KEPT + 1)):
            del self._jobs[old]
        job = PullJob(name)
        self._jobs[job.id] = job
        task = asyncio.create_task(job.run(manager), name=job.id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def find(self, job_id: str) -> PullJob:
        """The job of that id. Raises ResponseNotFound."""
        if job_id not in self._jobs:
            raise ResponseNotFound(f"there is no job {job_id[:100]!r}, or not any more", param="id")
        return self._jobs[job_id]


PULLS = web.AppKey("pulls", PullJobs)


def routes() -> list[web.RouteDef]:
    """The routes of this file; they come before those of single models."""
    return [web.post("/models/pull", _pull), web.get("/models/jobs/{id}", _job)]


async def _pull(request: web.Request) -> web.StreamResponse:
    body = await read_body(request, PullBody)
    manager = request.app[NODE].manager
    await manager.wish(body.name, deadline_of(request))  # what is wrong with the name itself has a status of its own
    job = request.app[PULLS].start(manager, body.name)
    return await _reply(request, job, 202)


async def _job(request: web.Request) -> web.StreamResponse:
    return await _reply(request, request.app[PULLS].find(request.match_info["id"]), 200)


async def _reply(request: web.Request, job: PullJob, status: int) -> web.StreamResponse:
    if "text/event-stream" not in request.headers.get("Accept", ""):
        body = orjson.dumps(job.told())
        return web.Response(body=body, status=status, content_type="application/json", charset="utf-8")
    async with EventStream(request, {}) as stream:
        async for told in job.changes():
            await stream.send(told)
    return stream.response
