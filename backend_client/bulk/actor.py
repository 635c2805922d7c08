"""What works on fragments in a process of a Ray cluster. Imports no Ray: any process can be one."""

from __future__ import annotations

import asyncio
import os

from backend_client.bulk.executors import WorkerLost
from backend_client.bulk.fragments import Fragment
from backend_client.bulk.job import BulkJob
from backend_client.bulk.receipts import Receipt
from backend_client.bulk.request import BulkRequest
from backend_client.bulk.tied_node import TiedNode
from backend_client.bulk.worker import Probe, Worker
from backend_client.client import NPUClient
from backend_client.lifetime import in_daemon_thread
from backend_client.settings import CONFIG_VARIABLE, ClientSettings

_LOOK_S = 0.5


class Actor:
    """Runs in a process of the cluster: a worker, and its own node if it was told to start one."""

    def __init__(self, request: BulkRequest, nodes: tuple[str, ...], *, start_node: bool) -> None:
        self._request = request
        self._nodes = nodes
        self._start_node = start_node
        self._one = asyncio.Lock()
        # The driver may ask again while a node still starts: that is not to start another one.
        self._preparing = asyncio.Lock()
        self._node: TiedNode | None = None
        self._worker: Worker | None = None
        self._job: BulkJob | None = None

    async def ready(self, job: BulkJob | None) -> int:
        """Make ready for a job; returns the process id. Started again by Ray, an actor knows nothing of its past."""
        async with self._preparing:
            if self._worker is None:
                self._worker = Worker(self._request, await self._settings())
            if job is not None and self._job != job:
                await self._worker.begin(job)
                self._job = job
        return os.getpid()

    async def probe(self, job: BulkJob | None) -> Probe:
        """See Executor."""
        await self.ready(None)
        return await self._used.probe(job)

    async def process(self, fragment: Fragment) -> Receipt:
        """See Executor: one after another, so that one death loses the work of one fragment."""
        async with self._one:
            return await self._used.submit(fragment)

    async def close(self) -> None:
        """End the node and the client."""
        if self._worker is not None:
            await self._worker.close()
        if self._node is not None:
            await in_daemon_thread(self._node.stop, "stop node")

    async def _settings(self) -> ClientSettings:
        """The client's settings of this machine, keys among them; the driver's nodes where it names none."""
        if self._start_node:
            if self._node is None:
                self._node = await in_daemon_thread(lambda: TiedNode.start(on_end=_end_actor), "start node")
            url, key = self._node.url, self._node.key
            # What the machine says of other nodes is not for this one, and no proxy leads to it.
            settings = ClientSettings.load(nodes=(url,), api_key=key, node_keys={url: key}, proxy=None)
            await _until_usable(settings)
            return settings
        own = "NPU_CLIENT_NODES" in os.environ or CONFIG_VARIABLE in os.environ
        return ClientSettings.load() if own else ClientSettings.load(nodes=self._nodes)

    @property
    def _used(self) -> Worker:
        if self._worker is None:
            raise WorkerLost("the actor was started again and has no job yet")
        return self._worker


def _end_actor() -> None:
    """End this process, whose node is gone: Ray starts the actor anew, and that starts a node."""
    os._exit(1)


async def _until_usable(settings: ClientSettings) -> None:
    """Wait until the node that was started serves a model."""
    async with NPUClient.from_settings(settings) as client:
        await client.health()
        while not any(node.usable for node in client.status()):  # noqa: ASYNC110  (a client has no event for this)
            await asyncio.sleep(_LOOK_S)
