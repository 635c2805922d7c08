"""Whether a model is in use, and since when it has been idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from worker_node.core.types import RequestContext


@dataclass(slots=True)
class Activity:
    """Counts the requests that a model works on. `clock` is monotonic seconds; `on_idle` is called after the last."""

    clock: Callable[[], float] = time.monotonic
    on_idle: Callable[[], None] | None = None
    _running: int = 0
    _since: float = 0.0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._since = self.clock()
        self._idle.set()

    def working(self) -> AbstractContextManager[None]:
        """Counts one request as in progress while the block runs."""
        return self

    def __enter__(self) -> None:
        self._running += 1
        self._idle.clear()

    def __exit__(self, *_error: object) -> None:
        self._running -= 1
        if not self._running:
            self._since = self.clock()
            self._idle.set()
            if self.on_idle is not None:
                self.on_idle()

    def used_by(self, context: RequestContext) -> AbstractContextManager[None]:
        """As `working`, for a request from when its model is found; a dry run does not count."""
        return nullcontext() if context.dry_run else self.working()

    @property
    def running(self) -> int:
        """How many requests run or wait for an engine."""
        return self._running

    @property
    def idle_since(self) -> float | None:
        """When the last request ended; None while one runs."""
        return None if self._running else self._since

    async def idle(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()
