"""Finds the requests that kill their engine. Pure but for the waiting: the caller supplies the time.

Every request in flight at a crash is a suspect. It runs again, alone on its engine; an answer clears it, and a request
that kills an engine while alone on it twice is refused, here and whenever it is sent again. Requests are identified by
a digest of the engine's input, never by their text."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from worker_node.core.errors import DeadlineExceeded
from worker_node.engines.protocol import Job

_DEATHS_ALONE = 2
# Deaths by suspects without an answer in between. An engine that dies more often is itself to blame: its deaths count
# towards its quarantine.
_DEATHS_WITHOUT_ANSWER = 8


@dataclass(slots=True)
class _Suspect:
    deaths_alone: int = 0
    seen: float = 0.0


@dataclass(slots=True)
class Suspects:
    """The suspects of one model; the least recently seen go beyond `capacity`, all after `memory_s`."""

    clock: Callable[[], float] = time.monotonic
    memory_s: float = 600.0
    capacity: int = 1024
    _suspects: OrderedDict[bytes, _Suspect] = field(default_factory=OrderedDict)
    _deaths_without_answer: int = 0

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, key: bytes) -> bool:
        return self._find(key) is not None

    def refuses(self, key: bytes) -> bool:
        """Whether the request killed an engine while alone on it, twice."""
        suspect = self._find(key)
        return suspect is not None and suspect.deaths_alone >= _DEATHS_ALONE

    def answered(self, key: bytes) -> None:
        self._deaths_without_answer = 0
        self._suspects.pop(key, None)

    def died(self, keys: Collection[bytes]) -> bool:
        """Record an engine's death at work on these requests. Returns whether a suspect that was alone is to blame."""
        if len(keys) != 1:
            for key in keys:
                self._note(key)
            return False
        (key,) = keys
        known = key in self
        self._note(key).deaths_alone += 1
        if known:
            self._deaths_without_answer += 1
        return known and self._deaths_without_answer <= _DEATHS_WITHOUT_ANSWER

    def clear(self) -> None:
        self._suspects.clear()
        self._deaths_without_answer = 0

    def _find(self, key: bytes) -> _Suspect | None:
        suspect = self._suspects.get(key)
        if suspect is not None and self.clock() - suspect.seen >= self.memory_s:
            del self._suspects[key]
            return None
        return suspect

    def _note(self, key: bytes) -> _Suspect:
        suspect = self._suspects.setdefault(key, _Suspect())
        suspect.seen = self.clock()
        self._suspects.move_to_end(key)
        if len(self._suspects) > self.capacity:
            self._suspects.popitem(last=False)
        return suspect


def fingerprint(job: Job) -> bytes:
    """The digest of a request: of all that its engine gets but the time and the tokens that are left for it."""
    return hashlib.blake2b(msgspec.msgpack.encode(job.timeless()), digest_size=16).digest()


class Isolation:
    """Use of one engine, shared or exclusive, in order of arrival."""

    def __init__(self) -> None:
        # Held while an exclusive use waits for the shared ones before it, or lasts.
        self._turn = asyncio.Lock()
        self._shared = 0
        self._unshared = asyncio.Event()
        self._unshared.set()

    @asynccontextmanager
    async def use(self, deadline: float, *, exclusive: bool = False) -> AsyncIterator[bool]:
        """Use the engine within the block; gives whether it may have waited. Entering raises DeadlineExceeded."""
        waits = exclusive or self._turn.locked()
        if waits:
            await self._wait(deadline, exclusive=exclusive)
        if not exclusive:
            self._shared += 1
            self._unshared.clear()
        try:
            yield waits
        finally:
            if exclusive:
                self._turn.release()
            else:
                self._shared -= 1
                if not self._shared:
                    self._unshared.set()

    async def _wait(self, deadline: float, *, exclusive: bool) -> None:
        """Wait for the turn of a use; an exclusive one keeps it."""
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._turn.acquire()
                try:
                    if exclusive:
                        await self._unshared.wait()
                        return
                except BaseException:
                    self._turn.release()
                    raise
                self._turn.release()
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed while the request waited for its turn alone") from error
