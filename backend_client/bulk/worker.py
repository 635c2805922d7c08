"""Processes fragments in one process, with a client of the nodes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from backend_client.bulk.answers import Embedding, Generation, Patience, Work
from backend_client.bulk.inputs import Fragment
from backend_client.bulk.job import BulkJob, BulkRequest
from backend_client.bulk.output import Receipt
from backend_client.bulk.process import process
from backend_client.bulk.stores import Store, open_store
from backend_client.client import InferenceClient
from backend_client.errors import (
    ConfigurationError,
    RequestRejected,
    VectorSpaceMismatch,
)
from backend_client.lifetime import in_daemon_thread
from backend_client.results import CallOptions
from backend_client.settings import ClientSettings

# Batch work waits behind interactive work, so a request may take longer than a caller who waits would allow.
_TIMEOUT_S = {"embed": 120.0, "generate": 600.0}
_PROMPTS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Probe:
    """What a node answered a first small request with. `excluded` are nodes in another vector space than the job's."""

    model: str
    space: str
    dimensions: int
    excluded: tuple[str, ...] = ()


class Worker:
    """Processes fragments in this event loop: see Executor."""

    def __init__(self, request: BulkRequest, settings: ClientSettings) -> None:
        self.lost = 0
        self.slots = request.window
        self._request = request
        self._settings = settings
        self._client: InferenceClient | None = None
        self._bound = False
        self._begun: tuple[BulkJob, Store, Work] | None = None

    async def probe(self, job: BulkJob | None) -> Probe:
        """Send one small request to a node, never to the cloud; again while no node answers and the patience allows.

        Raises RequestRejected (ModelNotFound for example) at once, and ConfigurationError when the nodes answer in
        another space than the job's.
        """
        client = await self._connected(job)
        options = self._options(job)
        options["local_only"] = True
        request, found = self._request, list[Probe]()

        async def ask() -> None:
            if request.kind == "generate":
                answer = await client.generate("a", max_new_tokens=1, **options)
                found.append(Probe(request.model or answer.model, "", 0))
                return
            result = await client.embed_result("a", **options)
            # Of all nodes: the others may be slower than the one that answered.
            excluded = tuple(
                node.url
                for node in await client.npu.health()
                if any(known.id == result.model and known.space not in {None, result.space} for known in node.models)
            )
            found.append(Probe(request.model or result.model, result.space, len(result.vector), excluded))

        try:
            await Patience(request.patience, request.attempts, ask).probe(final=(RequestRejected, VectorSpaceMismatch))
        except VectorSpaceMismatch as error:
            problem = error.message
        else:
            return found[-1]
        raise ConfigurationError(f"the nodes do not answer in the vector space of _job.json: {problem}")

    async def begin(self, job: BulkJob) -> None:
        """Make ready for the job's fragments. Raises NPUError when no node can serve it."""
        client = await self._connected(job)
        await client.npu.health()
        options, request = self._options(job), self._request
        store = await in_daemon_thread(lambda: open_store(request.out), "open output")
        work: Work
        if job.kind == "embed":
            slots = request.concurrency or client.npu.fleet.concurrency()
            work = Embedding(client, options, job, request, slots)
        else:
            slots = request.concurrency or max(1, len(client.npu.status())) * _PROMPTS_PER_NODE
            work = Generation(client, options, job, request, slots)
        self._begun = job, store, work

    async def submit(self, fragment: Fragment) -> Receipt:
        if self._begun is None:
            raise ConfigurationError("the worker has no job: call begin() first")
        return await process(fragment, *self._begun)

    async def changed(self) -> None:
        """See Executor: its slots never do."""
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _connected(self, job: BulkJob | None) -> InferenceClient:
        """The client, bound to the job's space once there is a job."""
        if self._client is not None and self._bound != (job is not None):
            await self.close()
        if self._client is None:
            self._bound = job is not None
            spaces = {job.model: job.space} if job is not None and job.space else {}
            local_only = self._settings.local_only or not self._request.allow_cloud
            settings = self._settings.model_copy(
                update={"spaces": {**self._settings.spaces, **spaces}, "local_only": local_only}
            )
            self._client = InferenceClient.from_settings(settings)
            if job is not None and job.space:
                self._client.npu.fleet.runtime.bindings.bind_dimensions(job.space, job.dimensions)
        return self._client

    def _options(self, job: BulkJob | None) -> CallOptions:
        request = self._request
        return CallOptions(
            model=job.model if job is not None else request.model,
            timeout=request.timeout or _TIMEOUT_S[request.kind],
            priority="batch",
            require_device=request.require_device,
        )


# Where fragments are processed: one protocol, implemented by `Worker` in this process and by `RayExecutor`.


class WorkerLost(Exception):
    """The process that worked on a fragment died, or its machine."""


class Executor(Protocol):
    """Processes fragments, `slots` of them at once, which may change. `lost`: workers that died so far."""

    lost: int

    @property
    def slots(self) -> int:
        """How many fragments can be under way now."""
        ...

    async def probe(self, job: BulkJob | None) -> Probe:
        """What the nodes answer with; with a job, in its vector space only. Raises NPUError."""
        ...

    async def begin(self, job: BulkJob) -> None:
        """Make ready for the fragments of a job."""
        ...

    async def submit(self, fragment: Fragment) -> Receipt:
        """Process a fragment. Raises WorkerLost, or what `process` raises."""
        ...

    async def changed(self) -> None:
        """Return when `slots` may have changed."""
        ...

    async def close(self) -> None:
        """End the work that is under way."""
        ...
