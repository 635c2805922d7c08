"""Processes fragments: where that is done (`Executor`), and how this process does it (`Worker`, `process`).

The rejected rows are committed before the data, under a name with their digest: the data file's metadata refers to
them. Two attempts may reject different rows (a node had a bad hour); what counts is what the file that won refers to.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from backend_client.bulk.answers import Patience, Results, Work, cancelled
from backend_client.bulk.inputs import Fragment
from backend_client.bulk.job import BulkJob, BulkRequest, Chunk
from backend_client.bulk.output import BEGUN, Receipt, Writer, read_receipts
from backend_client.bulk.readers import CHUNK_ROWS, read
from backend_client.bulk.stores import OutputFailed, Store, open_store
from backend_client.client import InferenceClient, NPUClient
from backend_client.errors import ConfigurationError, RequestRejected, VectorSpaceMismatch
from backend_client.lifetime import in_daemon_thread
from backend_client.results import CallOptions
from backend_client.settings import ClientSettings

R = TypeVar("R")

# Batch work waits behind interactive work, so a request may take longer than a caller who waits would allow.
_TIMEOUT_S = {"embed": 120.0, "generate": 600.0}
_PROMPTS_PER_NODE = 8
# The disk, the quota or the largest file is full; the file system is read-only.
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Probe:
    """What a node answered a first small request with. `excluded` nodes are in another vector space."""

    model: str
    space: str
    dimensions: int
    excluded: tuple[str, ...] = ()


class WorkerLost(Exception):
    """The process that worked on a fragment died, or its machine."""


class Executor(Protocol):
    """Processes fragments, `slots` of them at once, which may change. `lost`: workers that died.

    `isolated`: a fragment that kills the process which works on it ends no other work.
    """

    lost: int
    slots: int
    isolated: bool

    async def probe(self, job: BulkJob | None) -> Probe:
        """What the nodes answer with; with a job, in its vector space only. Raises NPUError."""

    async def submit(self, job: BulkJob, fragment: Fragment) -> Receipt:
        """Process a fragment of the job. Raises WorkerLost, or what `process` raises."""

    async def changed(self) -> None:
        """Return when `slots` may have changed."""

    async def close(self) -> None:
        """End the work that is under way."""


class Worker:
    """Processes fragments in this event loop, with one client for all of them: see Executor."""

    def __init__(self, request: BulkRequest, settings: ClientSettings) -> None:
        self.lost = 0
        self.slots = request.window
        self.isolated = False
        self._request = request
        self._settings = settings
        self._client: InferenceClient | NPUClient | None = None
        self._npu: NPUClient
        self._bound: BulkJob | None = None
        self._ready: tuple[Store, Work] | None = None
        self._preparing = asyncio.Lock()

    async def probe(self, job: BulkJob | None) -> Probe:
        """Send a small request to a node, never to the cloud, until one answers or the patience ends.

        Raises RequestRejected at once, and ConfigurationError for nodes in another space than the job's.
        """
        await self._connected(job)
        npu, options, request, found = self._npu, self._options(job), self._request, list[Probe]()

        async def ask() -> None:
            if request.kind == "generate":
                answer = await npu.generate("a", max_new_tokens=1, **options)
                found.append(Probe(request.model or answer.model, "", 0))
                return
            result = await npu.embed_result("a", **options)
            # Of all nodes: the others may be slower than the one that answered.
            excluded = tuple(
                node.url
                for node in await npu.health()
                if any(known.id == result.model and known.space not in {None, result.space} for known in node.models)
            )
            found.append(Probe(request.model or result.model, result.space, len(result.vector), excluded))

        try:
            await Patience(request.patience, request.attempts, ask).wait(final=(RequestRejected, VectorSpaceMismatch))
        except VectorSpaceMismatch as error:
            problem = error.message
        else:
            return found[-1]
        raise ConfigurationError(f"the nodes do not answer in the vector space of _job.json: {problem}")

    async def submit(self, job: BulkJob, fragment: Fragment) -> Receipt:
        async with self._preparing:
            if self._ready is None:
                self._ready = await self._prepared(job)
        return await process(fragment, job, *self._ready)

    async def changed(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _prepared(self, job: BulkJob) -> tuple[Store, Work]:
        client = await self._connected(job)
        await self._npu.health()
        request = self._request
        store = await in_daemon_thread(lambda: open_store(request.out), "open output")
        nodes, texts = max(1, len(self._npu.status())), client.core.nodes.concurrency()
        slots = request.concurrency or (texts if job.kind == "embed" else nodes * _PROMPTS_PER_NODE)
        return store, Work(client, self._options(job), job, request, slots)

    async def _connected(self, job: BulkJob | None) -> InferenceClient | NPUClient:
        """The client, bound to the job's space once there is a job; without leave for the cloud, of nodes alone."""
        if self._bound != job:
            await self.close()
        if self._client is None:
            self._bound = job
            spaces = {job.model: job.space} if job is not None and job.space else {}
            settings = self._settings.model_copy(update={"spaces": {**self._settings.spaces, **spaces}})
            if self._request.allow_cloud and not settings.local_only:
                self._client = client = InferenceClient.from_settings(settings)
                self._npu = client.npu
            else:
                self._client = self._npu = NPUClient.from_settings(settings)
            if job is not None and job.space:
                self._npu.fleet.runtime.bindings.bind_dimensions(job.space, job.dimensions)
        return self._client

    def _options(self, job: BulkJob | None) -> CallOptions:
        request = self._request
        return CallOptions(
            model=job.model if job is not None else request.model,
            timeout=request.timeout or _TIMEOUT_S[request.kind],
            priority="batch",
            require_device=request.require_device,
        )


async def process(fragment: Fragment, job: BulkJob, store: Store, work: Work) -> Receipt:
    """Serve the fragment and commit its file, unless another process was first.

    Raises OSError when the input cannot be read, OutputFailed, and NPUError when the fleet cannot serve it.
    """
    mark = f"{BEGUN}/{fragment.id}"

    def begin() -> Writer | Receipt:
        if store.has(fragment.name):
            return read_receipts(store, [fragment])[0]
        store.count(mark)
        return Writer(store.temporary(fragment.id), fragment, job)

    found = await _output(begin)
    if isinstance(found, Receipt):
        return found
    writer = found

    def commit() -> Receipt:
        receipt = writer.commit(store)
        store.remove([mark])
        return receipt

    def abandon() -> None:
        writer.abandon()
        store.remove([mark])

    try:
        await _serve_rows(fragment, job, work, writer)
        return await _output(commit)
    except BaseException:
        # Another fragment's failure may cancel this one even here; the temporary file must be gone all the same.
        await uninterrupted(in_daemon_thread(abandon, "abandon"))
        raise


async def _serve_rows(fragment: Fragment, job: BulkJob, work: Work, writer: Writer) -> None:
    """With no more chunks in memory than the nodes need."""
    pending: deque[tuple[Chunk, asyncio.Task[Results]]] = deque()
    chunks = read(fragment, job)

    async def write_first() -> None:
        chunk, task = pending.popleft()
        results = await task
        await _output(lambda: writer.add(chunk, results))

    try:
        while (chunk := await in_daemon_thread(lambda: next(chunks, None), "read input")) is not None:
            while len(pending) > -(-work.rows_ahead // CHUNK_ROWS):
                await write_first()
            pending.append((chunk, asyncio.create_task(work.run(chunk))))
        while pending:
            await write_first()
    finally:
        await cancelled(task for _, task in pending)


async def _output(work: Callable[[], R]) -> R:
    """Run blocking work in a thread. Raises OutputFailed where every fragment would fail alike, else OSError."""
    # A thread cannot be cancelled: who is goes when it has ended, so that nobody closes the file beneath it.
    try:
        return await uninterrupted(in_daemon_thread(work, "write output"))
    except OSError as error:
        if not isinstance(error, PermissionError) and error.errno not in _LASTING:
            raise
        problem = f"the output cannot be written: {error}"
    raise OutputFailed(f"{problem}; what was committed is kept: correct this and run the same command again")


async def uninterrupted(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run to the end, however often the caller is cancelled meanwhile; that is raised only then."""
    task = asyncio.create_task(coroutine)
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # it has been looked at: nothing is logged
    raise interruption
