"""Fragments as tasks of a Ray cluster. The only file that imports Ray, and only when it joins one.

A task takes one `intel_npu` of the cluster, so it runs on a machine with a node. The driver counts attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Self

from backend_client.bulk.inputs import Fragment
from backend_client.bulk.job import BulkJob, BulkRequest
from backend_client.bulk.output import Receipt
from backend_client.bulk.stores import need
from backend_client.bulk.worker import Probe, Worker, WorkerLost
from backend_client.errors import ConfigurationError, NPUUnavailableError
from backend_client.lifetime import LoopThread, in_daemon_thread
from backend_client.settings import CONFIG_VARIABLE, ClientSettings

RESOURCE = "intel_npu"
"""The custom resource of machines with a node. Not `NPU`: to Ray that is another maker's."""

OPTIONS = {"num_cpus": 0, "resources": {RESOURCE: 1}, "max_retries": 0}
"""Of each task. Ray retries no fragment: the driver counts attempts, and Ray would retry without end."""

# How often the cluster is looked at for machines that came or went.
_LOOK_S = 2.0
_PROBES = 3


class RayExecutor:
    """See Executor. While no machine has the resource for `patience` seconds, it raises NPUUnavailableError."""

    def __init__(
        self, request: BulkRequest, nodes: tuple[str, ...], process: Callable[..., Receipt] | None = None
    ) -> None:
        ray = need("ray", "ray")
        self.lost = 0
        self.slots = 0
        self.isolated = True
        self._patience = request.patience
        self._known = request, nodes
        self._process = ray.remote(process or process_fragment).options(**OPTIONS)
        self._probe = ray.remote(probe_nodes).options(**OPTIONS)

    @classmethod
    async def connect(cls, address: str, request: BulkRequest, settings: ClientSettings) -> Self:
        """Join the cluster at an address. Raises ConfigurationError if it cannot be joined."""
        if not address or address == "local":
            raise ConfigurationError("--ray takes the address of a cluster, such as 10.0.0.1:6379")
        ray = need("ray", "ray")
        # Ray would report how it is used to its makers; a cluster that somebody else started decides for itself.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        how = {"log_to_driver": False, "logging_level": logging.WARNING, "include_dashboard": None}
        try:
            await in_daemon_thread(lambda: ray.init(address=address, **how), "join cluster")
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
            return cls(request, settings.nodes)
        raise ConfigurationError(problem)

    async def probe(self, job: BulkJob | None) -> Probe:
        if not self.slots:
            await self.changed()
        for _ in range(_PROBES):
            with contextlib.suppress(WorkerLost):
                probe: Probe = await self._call(self._probe, job)
                return probe
        raise NPUUnavailableError(f"the process that asked the nodes died {_PROBES} times")

    async def submit(self, job: BulkJob, fragment: Fragment) -> Receipt:
        receipt: Receipt = await self._call(self._process, job, fragment)
        return receipt

    async def changed(self) -> None:
        """Raises NPUUnavailableError when no machine had the resource for the patience."""
        ray = need("ray", "ray")
        began = time.monotonic()
        while (found := round(ray.cluster_resources().get(RESOURCE, 0))) == self.slots:
            if not found and time.monotonic() - began >= self._patience:
                raise NPUUnavailableError(
                    f"no machine of the Ray cluster had the resource {RESOURCE} within {self._patience:.0f} s"
                )
            await asyncio.sleep(_LOOK_S)
        self.slots = found

    async def close(self) -> None:
        await in_daemon_thread(need("ray", "ray").shutdown, "leave cluster")

    async def _call(self, task: Any, *arguments: Any) -> Any:
        ray = need("ray", "ray")
        try:
            return await task.remote(*self._known, *arguments)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else None
            raise (cause or OSError(str(error).splitlines()[-1])) from None
        except ray.exceptions.RayError:
            self.lost += 1
            raise WorkerLost("the process died") from None


# What runs in a process of the cluster, which belongs to one driver, so to one job.


class ProcessWorker:
    """The worker of this process and its event loop, made for the first task."""

    def __init__(self) -> None:
        self.loop = LoopThread("fragments", self._close)
        self._worker: Worker | None = None

    def of(self, request: BulkRequest, nodes: tuple[str, ...]) -> Worker:
        if self._worker is None:
            # The client's settings of this machine, keys among them; the driver's nodes where it names none.
            own = "NPU_CLIENT_NODES" in os.environ or CONFIG_VARIABLE in os.environ
            self._worker = Worker(request, ClientSettings.load() if own else ClientSettings.load(nodes=nodes))
        return self._worker

    async def _close(self) -> None:
        if self._worker is not None:
            await self._worker.close()


PROCESS = ProcessWorker()


def process_fragment(request: BulkRequest, nodes: tuple[str, ...], job: BulkJob, fragment: Fragment) -> Receipt:
    return PROCESS.loop.run(PROCESS.of(request, nodes).submit(job, fragment))


def probe_nodes(request: BulkRequest, nodes: tuple[str, ...], job: BulkJob | None) -> Probe:
    return PROCESS.loop.run(PROCESS.of(request, nodes).probe(job))
