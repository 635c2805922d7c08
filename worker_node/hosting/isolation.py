"""Who may be on an engine together while the cause of an engine's death is looked for.

Clear requests share the engine. A suspect enters when only suspects that have shown themselves harmless are on board,
one at a time; the prime suspect enters an empty engine. Neither keeps the engine from those it runs already: for a
prime suspect the engine must become idle by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from worker_node.errors import DeadlineExceeded
from worker_node.hosting.suspicion import Standing

# A suspect that finds the engine in use waits so long to be tried apart; then it is run with the others.
_PATIENCE_S = 2.0
# So long after its first result the prime suspect keeps the others out.
_ALONE_S = 10.0


@dataclass(eq=False, slots=True)
class Visit:
    """A request on the engine. `apart` until it has shown itself harmless."""

    standing: Standing
    apart: bool = field(init=False)

    def __post_init__(self) -> None:
        self.apart = self.standing is not Standing.CLEAR


@dataclass(slots=True)
class Isolation:
    """The requests on one engine, and those that wait for it."""

    _inside: set[Visit] = field(default_factory=set)
    _waiting: dict[Visit, asyncio.Future[None]] = field(default_factory=dict)
    _reserved: int = 0
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def visit(self, standing: Standing, deadline: float) -> AsyncIterator[Visit]:
        """Be on the engine while the block runs; `deadline` is monotonic time. Raises DeadlineExceeded."""
        visit = Visit(standing)
        if not self._may_enter(visit):
            await self._wait(visit, deadline)
        self._inside.add(visit)
        try:
            yield visit
        finally:
            self._inside.discard(visit)
            self._admit()

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """A suspect waits for the engine to be started again: clear requests let it go first."""
        self._reserved += 1
        try:
            yield
        finally:
            self._reserved -= 1
            # In the next turn, so that whoever had it reserved can enter.
            asyncio.get_running_loop().call_soon(self._admit)

    def harmless(self, visit: Visit) -> None:
        """A first result has come of it."""
        if visit.standing is Standing.PRIME:
            asyncio.get_running_loop().call_later(_ALONE_S, self._release, visit)
        else:
            self._release(visit)

    async def trials_over(self) -> bool:
        """Wait until no suspect is being tried or waits for that; False if there was nothing to wait for."""
        if not self._trials:
            return False
        while self._trials:
            self._over.clear()
            await self._over.wait()
        return True

    def _release(self, visit: Visit) -> None:
        visit.apart = False
        self._admit()

    def _lose_patience(self, visit: Visit) -> None:
        if self._shared and visit in self._waiting:
            self._release(visit)

    @property
    def _trials(self) -> bool:
        """Whether a suspect is tried or can be tried next."""
        trying = any(visit.apart for visit in self._inside)
        return trying or (not self._shared and (self._reserved > 0 or self._suspects_wait))

    @property
    def _shared(self) -> bool:
        return any(visit.standing is Standing.CLEAR for visit in self._inside)

    @property
    def _suspects_wait(self) -> bool:
        return any(visit.standing is Standing.SUSPECT for visit in self._waiting)

    def _may_enter(self, visit: Visit) -> bool:
        if any(other.apart for other in self._inside):
            return False
        if visit.standing is Standing.PRIME:
            return not self._inside
        if visit.standing is Standing.SUSPECT and visit.apart:
            return not self._shared
        return not self._trials

    async def _wait(self, visit: Visit, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        future = self._waiting[visit] = loop.create_future()
        timer = None
        if visit.standing is Standing.SUSPECT:
            timer = loop.call_later(_PATIENCE_S, self._lose_patience, visit)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await future
        except TimeoutError as error:
            self._give_up(visit)
            raise DeadlineExceeded(
                "the deadline passed while the request waited to be run apart from others"
            ) from error
        except asyncio.CancelledError:
            self._give_up(visit)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._waiting.pop(visit, None)

    def _give_up(self, visit: Visit) -> None:
        del self._waiting[visit]
        self._inside.discard(visit)
        self._admit()

    def _admit(self) -> None:
        # Suspects first, since they have waited for a restart; the prime suspect last.
        order = {Standing.SUSPECT: 0, Standing.CLEAR: 1, Standing.PRIME: 2}
        for visit in sorted(self._waiting, key=lambda visit: order[visit.standing]):
            future = self._waiting[visit]
            if not future.done() and self._may_enter(visit):
                self._inside.add(visit)
                future.set_result(None)
        if not self._trials:
            self._over.set()
