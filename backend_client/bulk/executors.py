"""Where fragments are processed: one protocol, with an implementation in this process here, one on Ray elsewhere."""

from __future__ import annotations

import asyncio
from typing import Protocol

from backend_client.bulk.fragments import Fragment
from backend_client.bulk.job import BulkJob
from backend_client.bulk.receipts import Receipt
from backend_client.bulk.supervisor import Note, noted
from backend_client.bulk.worker import Probe, Worker


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


class LocalExecutor:
    """Processes fragments in this event loop, `window` at a time. `note` is told what is under way."""

    def __init__(self, worker: Worker, window: int, note: Note | None = None) -> None:
        self.lost = 0
        self._worker = worker
        self._window = window
        self._note = note

    @property
    def slots(self) -> int:
        """See Executor."""
        return self._window

    async def probe(self, job: BulkJob | None) -> Probe:
        """See Executor."""
        return await self._worker.probe(job)

    async def begin(self, job: BulkJob) -> None:
        """See Executor."""
        await self._worker.begin(job)

    async def submit(self, fragment: Fragment) -> Receipt:
        """See Executor."""
        with noted(self._note, fragment.id):
            return await self._worker.process(fragment)

    async def changed(self) -> None:
        """See Executor: they never do."""
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """See Executor."""
        await self._worker.close()
