"""Where the results of one job go in the edge process."""

from __future__ import annotations

import asyncio

from worker_node.engines.messages import Result
from worker_node.errors import NodeError


class JobSink:
    """Holds a job's results, encoded, until its caller reads them. Bounded by what one job can bring forth."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Result | NodeError] = asyncio.Queue()

    async def next(self) -> Result:
        """Return the next result. Raises the error that ended the job."""
        item = await self._queue.get()
        if isinstance(item, NodeError):
            raise item
        return item

    def on_result(self, result: Result) -> None:
        """Take a result."""
        self._queue.put_nowait(result)

    def on_error(self, error: NodeError) -> None:
        """The job ends with `error`."""
        self._queue.put_nowait(error)
