"""Fragments on the actors of a Ray cluster. The only file that imports Ray, and only when it joins one.

One actor for each `intel_npu` of the cluster, so on the machines that have a node. Ray starts an actor that died again,
where the resource is; the driver counts attempts, so a fragment that kills its actor is not retried without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from backend_client.bulk.inputs import Fragment
from backend_client.bulk.job import BulkJob, BulkRequest
from backend_client.bulk.optional import need
from backend_client.bulk.output import Receipt
from backend_client.bulk.worker import Probe, Worker, WorkerLost
from backend_client.errors import ConfigurationError, NPUUnavailableError
from backend_client.lifetime import in_daemon_thread
from backend_client.settings import CONFIG_VARIABLE, ClientSettings

RESOURCE = "intel_npu"
"""The custom resource of machines with a node. Not `NPU`: to Ray that is another maker's."""

OPTIONS = {"num_cpus": 0, "resources": {RESOURCE: 1}, "max_restarts": -1, "max_task_retries": 0}
"""Of each actor. Ray retries no fragment: the driver counts attempts, and Ray would retry without end."""

# How often the cluster is looked at for machines that came or went.
_LOOK_S = 2.0
_READY_S = 300.0
# Pauses before an actor that failed to make ready is asked again: doubled from the first up to the last.
_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 15.0


@dataclass(slots=True, eq=False)
class _Handle:
    """An actor as the driver sees it; `ready` once it has answered, until its fragment is lost. It has one at a time:
    so the one that it worked on when it died is known.
    """

    actor: Any
    ready: bool = False
    busy: bool = False
    preparing: asyncio.Task[None] | None = None


class RayExecutor:
    """See Executor. While no actor is ready for `patience` seconds, it raises NPUUnavailableError."""

    def __init__(self, make: Callable[[], Any], count: Callable[[], int], patience: float = 600.0) -> None:
        self.lost = 0
        self._patience = patience
        self._problem = f"no machine of the cluster has a free {RESOURCE}"
        self._make = make
        self.count = count
        self._actors: list[_Handle] = []
        self._job: BulkJob | None = None
        self._changed = asyncio.Event()
        self._look: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, address: str, request: BulkRequest, settings: ClientSettings) -> Self:
        """Join the cluster at an address. Raises ConfigurationError if it cannot be joined."""
        if not address or address == "local":
            raise ConfigurationError("--ray takes the address of a cluster, such as 10.0.0.1:6379")
        ray = need("ray", "ray")
        try:
            await in_daemon_thread(lambda: _join(ray, address), "join cluster")
        except (ConnectionError, RuntimeError, ValueError) as error:
            problem = f"the Ray cluster at {address} cannot be joined: {error}"
        else:
            if os.environ.get("RAY_AUTH_MODE") != "token":
                # A cluster with tokens admits no driver without one.
                logging.getLogger(__name__).warning(
                    "the Ray cluster at %s has no token authentication: anybody who reaches it can run code on all its "
                    "machines; set RAY_AUTH_MODE=token in the cluster and here",
                    address,
                )
            remote = ray.remote(Actor).options(**OPTIONS)
            return cls(
                lambda: remote.remote(request, settings.nodes),
                lambda: round(ray.cluster_resources().get(RESOURCE, 0)),
                request.patience,
            )
        raise ConfigurationError(problem)

    @property
    def slots(self) -> int:
        return sum(handle.ready for handle in self._actors)

    async def probe(self, job: BulkJob | None) -> Probe:
        await self._started()
        while True:
            handle = await self._idle()
            with contextlib.suppress(WorkerLost):
                probe: Probe = await self._call(handle, handle.actor.probe.remote(job))
                return probe

    async def begin(self, job: BulkJob) -> None:
        """Actors make ready again, each with the job."""
        await self._started()
        self._job = job
        for handle in self._actors:
            self._prepare(handle)
        while not any(handle.ready for handle in self._actors):
            await self.changed()

    async def submit(self, fragment: Fragment) -> Receipt:
        handle = await self._idle()
        receipt: Receipt = await self._call(handle, handle.actor.process.remote(fragment))
        return receipt

    async def changed(self) -> None:
        """Raises NPUUnavailableError when no actor was ready for as long as the patience says."""
        if any(handle.ready for handle in self._actors):
            await self._changed.wait()
            return
        try:
            await asyncio.wait_for(self._changed.wait(), self._patience)
        except TimeoutError:
            raise NPUUnavailableError(
                f"no actor of the Ray cluster was ready within {self._patience:.0f} s: {self._problem}"
            ) from None

    async def close(self) -> None:
        ray = need("ray", "ray")
        tasks = [handle.preparing for handle in self._actors if handle.preparing is not None]
        tasks += [self._look] if self._look is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        closing = [handle.actor.close.remote() for handle in self._actors if handle.ready]
        if closing:
            await in_daemon_thread(lambda: ray.wait(closing, num_returns=len(closing), timeout=10), "close actors")
        for handle in self._actors:
            ray.kill(handle.actor, no_restart=True)
        await in_daemon_thread(ray.shutdown, "leave cluster")

    async def _started(self) -> None:
        if self._look is None:
            self._grow()
            self._look = asyncio.create_task(self._watch())
            if not self._actors:
                logging.getLogger(__name__).warning("no machine of the cluster has the resource %s yet", RESOURCE)

    async def _watch(self) -> None:
        """Make an actor for each machine that joins. What Ray cannot place waits until it can."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._grow()

    def _grow(self) -> None:
        for _ in range(self.count() - len(self._actors)):
            handle = _Handle(self._make())
            self._actors.append(handle)
            self._prepare(handle)

    def _prepare(self, handle: _Handle) -> None:
        handle.ready = False
        if handle.preparing is not None:
            handle.preparing.cancel()
        handle.preparing = asyncio.create_task(self._ready(handle))

    async def _ready(self, handle: _Handle) -> None:
        """Ask until the actor answers: it may be starting, or waiting for a machine."""
        ray = need("ray", "ray")
        pause = _FIRST_PAUSE_S
        while True:
            try:
                await asyncio.wait_for(handle.actor.ready.remote(self._job), _READY_S)
            except TimeoutError:
                self._problem = f"an actor was not placed, or not ready, for {_READY_S:.0f} s"
            except (ray.exceptions.RayError, NPUUnavailableError) as error:
                self._note(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)
            else:
                handle.ready = True
                self._notify()
                return

    def _note(self, error: Exception) -> None:
        """Say once why an actor is not ready: the job goes on without it, or waits for it."""
        cause = getattr(error, "cause", None) or error
        problem = str(cause).strip().splitlines()[-1:] or [type(cause).__name__]
        if problem[0] != self._problem:
            self._problem = problem[0]
            logging.getLogger(__name__).warning("an actor is not ready: %s", self._problem)

    async def _idle(self) -> _Handle:
        """An actor that is ready and has no fragment: the one that a slot was counted for may have died since."""
        while True:
            for handle in self._actors:
                if handle.ready and not handle.busy:
                    return handle
            await self.changed()

    async def _call(self, handle: _Handle, reference: Any) -> Any:
        ray = need("ray", "ray")
        handle.busy = True
        try:
            return await reference
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else None
            if isinstance(cause, WorkerLost):
                self._prepare(handle)
            raise (cause or OSError(str(error).splitlines()[-1])) from None
        except ray.exceptions.RayError:
            self.lost += 1
            self._prepare(handle)
            raise WorkerLost("the actor died") from None
        finally:
            handle.busy = False
            self._notify()

    def _notify(self) -> None:
        """Wake all who wait now; who waits from here on waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


def _join(ray: Any, address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, include_dashboard=None)


# What works on fragments in a process of the cluster.


class Actor:
    """Runs in a process of the cluster: a worker, with the nodes of its machine."""

    def __init__(self, request: BulkRequest, nodes: tuple[str, ...]) -> None:
        self._request = request
        self._nodes = nodes
        # The driver may ask again while the last request still runs.
        self._preparing = asyncio.Lock()
        self._worker: Worker | None = None
        self._job: BulkJob | None = None

    async def ready(self, job: BulkJob | None) -> int:
        """Make ready for a job; returns the process id. Started again by Ray, an actor knows nothing of its past."""
        async with self._preparing:
            if self._worker is None:
                self._worker = Worker(self._request, self._settings())
            if job is not None and self._job != job:
                await self._worker.begin(job)
                self._job = job
        return os.getpid()

    async def probe(self, job: BulkJob | None) -> Probe:
        await self.ready(None)
        return await self._used.probe(job)

    async def process(self, fragment: Fragment) -> Receipt:
        return await self._used.submit(fragment)

    async def close(self) -> None:
        """End the client."""
        if self._worker is not None:
            await self._worker.close()

    def _settings(self) -> ClientSettings:
        """The client's settings of this machine, keys among them; the driver's nodes where it names none."""
        own = "NPU_CLIENT_NODES" in os.environ or CONFIG_VARIABLE in os.environ
        return ClientSettings.load() if own else ClientSettings.load(nodes=self._nodes)

    @property
    def _used(self) -> Worker:
        if self._worker is None:
            raise WorkerLost("the actor was started again and has no job yet")
        return self._worker
