"""Admits requests to an engine as `trials.py` decides, and bounds how long each may wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

from worker_node.core.errors import DeadlineExceeded
from worker_node.hosting.suspicion import Standing
from worker_node.hosting.trials import Trials, Visit

# A suspect that finds the engine in use waits so long to be tried apart; then it is run with the others.
_PATIENCE_S = 2.0
# The prime suspect needs an empty engine: after so long no other request is admitted before it.
_URGENT_S = 5.0
# So long after its first result the prime suspect keeps the others out.
_ALONE_S = 10.0


class _OnBoard:
    """The context manager of `Isolation.visit`. A class, not a generator, because every request makes one."""

    __slots__ = ("_deadline", "_isolation", "_visit")

    def __init__(self, isolation: Isolation, visit: Visit, deadline: float) -> None:
        self._isolation = isolation
        self._visit = visit
        self._deadline = deadline

    async def __aenter__(self) -> Visit:
        try:
            await self._isolation.enter(self._visit, self._deadline)
        except BaseException:
            self._isolation.leave(self._visit)
            raise
        return self._visit

    async def __aexit__(self, *_error: object) -> None:
        self._isolation.leave(self._visit)


class Isolation:
    """The requests on one engine, and those that wait to enter it."""

    def __init__(self) -> None:
        self._trials = Trials()
        self._waiting: dict[Visit, asyncio.Future[None]] = {}

    @property
    def trials_go_on(self) -> bool:
        """Whether a suspect is being tried or waits for its trial, so that the engine may die soon."""
        return self._trials.going_on

    def visit(
        self, standing: Standing, deadline: float, company: int = 1, *, thorough: bool = False
    ) -> AbstractAsyncContextManager[Visit]:
        """Hold a place on the engine within the block; `deadline` is monotonic. Entering raises DeadlineExceeded."""
        return _OnBoard(self, Visit(standing, company, thorough), deadline)

    async def enter(self, visit: Visit, deadline: float) -> None:
        """Take a place on the engine, or queue for one, until `leave`. Raises DeadlineExceeded."""
        if not self._trials.arrive(visit):
            await self._wait(visit, deadline)

    def leave(self, visit: Visit) -> None:
        """Release the place, so that others may enter."""
        self._trials.leave(visit)
        if self._trials.waiting:
            self._admit()

    @contextmanager
    def reserved(self, company: int = 1) -> Iterator[None]:
        """A suspect waits for the engine to be started again: clear requests let it go first."""
        self._trials.coming[company] += 1
        try:
            yield
        finally:
            self._trials.coming[company] -= 1
            # In the next turn, so that whoever had it reserved can enter.
            asyncio.get_running_loop().call_soon(self._admit)

    def harmless(self, visit: Visit) -> None:
        """Record that the engine survived the request: at its first result, or at its last if it is `thorough`."""
        if visit.standing is Standing.PRIME:
            asyncio.get_running_loop().call_later(_ALONE_S, self._release, visit)
        else:
            self._release(visit)

    def _release(self, visit: Visit) -> None:
        visit.apart = False
        self._admit()

    def _lose_patience(self, visit: Visit) -> None:
        if self._trials.shared and visit in self._waiting:
            self._release(visit)

    def _urge(self, visit: Visit) -> None:
        if visit in self._waiting:
            visit.urgent = True

    async def _wait(self, visit: Visit, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        future = self._waiting[visit] = loop.create_future()
        timer = None
        if visit.standing is Standing.SUSPECT:
            timer = loop.call_later(_PATIENCE_S, self._lose_patience, visit)
        elif visit.standing is Standing.PRIME:
            timer = loop.call_later(_URGENT_S, self._urge, visit)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await future
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the deadline passed while the request waited to be run apart from others"
            ) from error
        finally:
            del self._waiting[visit]
            if timer is not None:
                timer.cancel()

    def _admit(self) -> None:
        for visit in self._trials.admit():
            future = self._waiting[visit]
            if not future.done():
                future.set_result(None)
