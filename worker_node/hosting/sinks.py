"""Where the events of one job go in the edge process."""

from __future__ import annotations

import asyncio
from typing import Protocol

from worker_node.engines.messages import Embedded, TokenDelta
from worker_node.errors import NodeError


class JobSink(Protocol):
    """Who waits for the events of one job."""

    def on_result(self, result: Embedded | TokenDelta) -> None: ...
    def on_error(self, error: NodeError) -> None: ...


class EmbeddingSink:
    """Waits for the one result of an embedding."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Embedded] = asyncio.get_running_loop().create_future()

    def on_result(self, result: Embedded | TokenDelta) -> None:
        """See `JobSink`."""
        if isinstance(result, Embedded) and not self.future.done():
            self.future.set_result(result)

    def on_error(self, error: NodeError) -> None:
        """See `JobSink`."""
        if not self.future.done():
            self.future.set_exception(error)


class GenerationSink:
    """At most one generation's tokens wait here, so a slow reader holds a bounded list of integers and no more."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[TokenDelta | NodeError] = asyncio.Queue()

    async def next(self) -> TokenDelta:
        """The next tokens. Raises the error that ended the generation."""
        item = await self._queue.get()
        if isinstance(item, NodeError):
            raise item
        return item

    def on_result(self, result: Embedded | TokenDelta) -> None:
        """See `JobSink`."""
        if isinstance(result, TokenDelta):
            self._queue.put_nowait(result)

    def on_error(self, error: NodeError) -> None:
        """See `JobSink`."""
        self._queue.put_nowait(error)
