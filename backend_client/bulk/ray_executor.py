"""Fragments on the actors of a Ray cluster. The only file that imports Ray.

One actor for each `intel_npu` of the cluster, so on the machines that have a node. Ray starts an actor that died again,
where the resource is; the driver counts attempts, so a fragment that kills its actor is not retried without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from backend_client.bulk.inputs import Fragment
from backend_client.bulk.job import BulkJob
from backend_client.bulk.optional import need
from backend_client.bulk.output import Receipt
from backend_client.bulk.request import BulkRequest
from backend_client.bulk.worker import Actor, Probe, WorkerLost
from backend_client.errors import ConfigurationError, NPUUnavailableError
from backend_client.lifetime import in_daemon_thread
from backend_client.settings import ClientSettings

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


class _NotBegun(Exception):
    """The actor died before it began with this fragment."""


@dataclass(slots=True, eq=False)
class _Handle:
    """An actor as the driver sees it; `ready` once it has answered, until one of its fragments is lost."""

    actor: Any
    ready: bool = False
    queue: list[object] = field(default_factory=list)
    """What it has been given, in that order: it works on the first, and has not begun the others."""
    blamed: object = None
    """What it worked on when it died last."""
    preparing: asyncio.Task[None] | None = None


class RayExecutor:
    """See Executor. `per_actor` fragments are given to each actor, so that it never waits for the driver.

    While no actor is ready for `patience` seconds, it raises NPUUnavailableError.
    """

    def __init__(
        self, make: Callable[[], Any], count: Callable[[], int], per_actor: int, patience: float = 600.0
    ) -> None:
        self.lost = 0
        self._patience = patience
        self._problem = f"no machine of the cluster has a free {RESOURCE}"
        self._make = make
        self.count = count
        self._per_actor = per_actor
        self._actors: list[_Handle] = []
        self._job: BulkJob | None = None
        self._changed = asyncio.Event()
        self._look: asyncio.Task[None] | None = None
        self._alone = 0
        """Fragments that wait for an actor without work."""

    @classmethod
    async def connect(
        cls, address: str, request: BulkRequest, settings: ClientSettings, *, start_nodes: bool = False
    ) -> Self:
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
                lambda: remote.remote(request, settings.nodes, start_node=start_nodes),
                lambda: round(ray.cluster_resources().get(RESOURCE, 0)),
                request.window,
                request.patience,
            )
        raise ConfigurationError(problem)

    @property
    def slots(self) -> int:
        """See Executor."""
        return sum(self._per_actor for handle in self._actors if handle.ready)

    async def probe(self, job: BulkJob | None) -> Probe:
        """See Executor: the first actor that is ready answers."""
        await self._started()
        while True:
            handle = self._least()
            if handle is not None:
                with contextlib.suppress(WorkerLost, _NotBegun):
                    probe: Probe = await self._call(handle, handle.actor.probe.remote(job))
                    return probe
            else:
                await self.changed()

    async def begin(self, job: BulkJob) -> None:
        """See Executor. Actors make ready again, each with the job."""
        await self._started()
        self._job = job
        for handle in self._actors:
            self._prepare(handle)
        while not any(handle.ready for handle in self._actors):
            await self.changed()

    async def submit(self, fragment: Fragment) -> Receipt:
        """See Executor."""
        alone = False
        while True:
            handle = self._least()
            # The actor that the slot was counted for may have died since: that is no attempt.
            if handle is None or (alone and handle.queue):
                self._alone += alone
                await self.changed()
                self._alone -= alone
                continue
            try:
                receipt: Receipt = await self._call(handle, handle.actor.process.remote(fragment))
            except _NotBegun:
                # Nothing says that it is harmless: it goes on where nothing else can be blamed.
                alone = True
            else:
                return receipt

    async def changed(self) -> None:
        """See Executor. Raises NPUUnavailableError when no actor was ready for as long as the patience says."""
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
        """See Executor: nodes that actors started end with them."""
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
                self._problem = f"an actor was not placed, or its node served no model, for {_READY_S:.0f} s"
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

    def _least(self) -> _Handle | None:
        ready = [handle for handle in self._actors if handle.ready]
        return min(ready, key=lambda handle: len(handle.queue), default=None)

    async def _call(self, handle: _Handle, reference: Any) -> Any:
        ray = need("ray", "ray")
        place = object()
        handle.queue.append(place)
        try:
            return await reference
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else None
            if isinstance(cause, WorkerLost):
                self._prepare(handle)
            raise (cause or OSError(str(error).splitlines()[-1])) from None
        except ray.exceptions.RayError:
            self._died(handle)
            begun = handle.blamed is place
        finally:
            handle.queue.remove(place)
            if self._alone:
                self._notify()
        raise WorkerLost("the actor died") if begun else _NotBegun

    def _died(self, handle: _Handle) -> None:
        """Several fragments of an actor fail with it: it is counted once."""
        if handle.ready:
            self.lost += 1
            handle.blamed = handle.queue[0]
            self._prepare(handle)
            self._notify()

    def _notify(self) -> None:
        """Wake all who wait now; who waits from here on waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


def _join(ray: Any, address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, include_dashboard=None)
