"""A worker: a client of the nodes, and the fragments that it processes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from backend_client._api.inference_client import InferenceClient
from backend_client._resilience.threads import in_daemon_thread
from backend_client.bulk.embedding import Embedding
from backend_client.bulk.fragments import Fragment
from backend_client.bulk.generation import Generation
from backend_client.bulk.job import BulkJob
from backend_client.bulk.process import Work, process
from backend_client.bulk.receipts import Receipt
from backend_client.bulk.request import BulkRequest
from backend_client.bulk.stores import Store, open_store
from backend_client.errors import ConfigurationError, VectorSpaceMismatch
from backend_client.results import CallOptions, EmbedOptions
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
    """Made in the process that does the work. The client belongs to its event loop."""

    def __init__(self, request: BulkRequest, settings: ClientSettings) -> None:
        self._request = request
        self._settings = settings
        self._client: InferenceClient | None = None
        self._bound = False
        self._job: BulkJob | None = None
        self._store: Store | None = None
        self._work: Work | None = None

    async def probe(self, job: BulkJob | None) -> Probe:
        """Send one small request. Raises ConfigurationError when the nodes answer in another space than the job's."""
        client = await self._connected(job)
        options = self._options(job)
        if self._request.kind == "generate":
            answer = await client.generate("a", max_new_tokens=1, **options)
            return Probe(self._request.model or answer.model, "", 0)
        try:
            result = await client.embed_result("a", **options)
        except VectorSpaceMismatch as error:
            problem = error.message
        else:
            nodes = await client.npu.health()  # of all nodes: the others may be slower than the one that answered
            excluded = tuple(
                node.url
                for node in nodes
                if any(known.id == result.model and known.space not in {None, result.space} for known in node.models)
            )
            return Probe(self._request.model or result.model, result.space, len(result.vector), excluded)
        raise ConfigurationError(f"the nodes do not answer in the vector space of job.json: {problem}")

    async def begin(self, job: BulkJob) -> None:
        """Make ready for the job's fragments. Raises NPUError when no node can serve it."""
        client = await self._connected(job)
        await client.npu.health()
        options = self._options(job)
        self._store = await in_daemon_thread(lambda: open_store(self._request.out), "open output")
        self._job = job
        request = self._request
        if job.kind == "embed":
            slots = request.concurrency or client.npu.backend.concurrency()
            truncate = EmbedOptions(truncate=bool(job.options.get("truncate")))
            embedding = cast("EmbedOptions", {**options, **truncate})
            self._work = Embedding(client, job, embedding, slots, request.patience)
        else:
            slots = request.concurrency or max(1, len(client.npu.status())) * _PROMPTS_PER_NODE
            self._work = Generation(client, job, options, slots, request.patience)

    @property
    def work(self) -> Work:
        """What it does with rows. Raises ConfigurationError before a job is begun."""
        if self._work is None:
            raise ConfigurationError("the worker has no job: call begin() first")
        return self._work

    async def process(self, fragment: Fragment) -> Receipt:
        """Process a fragment of the job that was begun."""
        if self._job is None or self._store is None:
            raise ConfigurationError("the worker has no job: call begin() first")
        return await process(fragment, self._job, self._store, self.work)

    async def close(self) -> None:
        """Close the client."""
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
        return self._client

    def _options(self, job: BulkJob | None) -> CallOptions:
        request = self._request
        return CallOptions(
            model=job.model if job is not None else request.model,
            timeout=request.timeout or _TIMEOUT_S[request.kind],
            priority="batch",
            require_device=request.require_device,
        )
