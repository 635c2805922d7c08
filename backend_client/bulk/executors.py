"""Where fragments are processed: one protocol, implemented by `Worker` in this process and by `RayExecutor`."""

from __future__ import annotations

from typing import Protocol

from backend_client.bulk.fragments import Fragment
from backend_client.bulk.job import BulkJob
from backend_client.bulk.receipts import Receipt
from backend_client.bulk.worker import Probe


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
