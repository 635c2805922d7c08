"""Finds the requests that kill their engine. Pure but for the waiting: the caller supplies the time.

Every request in flight at a crash is a suspect. It runs again, alone on its engine for twice as long as it had run at
the crash; others wait no longer for it. An answer clears it, and a request that kills an engine while alone on it twice
is refused, here and whenever it is sent again. Requests are identified by a digest of the engine's input, never by
their text."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
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
    ran_s: float = 0.0


@dataclass(slots=True)
class Suspects:
    """The suspects of one model; the least recently seen go beyond `capacity`, all after `memory_s`.

    A suspect runs alone for at least `alone_s`.
    """

    clock: Callable[[], float] = time.monotonic
    memory_s: float = 600.0
    capacity: int = 1024
    alone_s: float = 10.0
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

    def time_alone(self, key: bytes) -> float:
        """For how many seconds a request must run alone; 0 if it is no suspect."""
        suspect = self._find(key)
        return 0.0 if suspect is None else max(self.alone_s, 2 * suspect.ran_s)

    def answered(self, key: bytes) -> None:
        self._deaths_without_answer = 0
        self._suspects.pop(key, None)

    def died(self, ran: Mapping[bytes, float]) -> bool:
        """Record an engine's death at work on these requests, each of which had run for so many seconds.

        Returns whether a suspect that was alone is to blame.
        """
        known = any(key in self for key in ran)
        for key, ran_s in ran.items():
            suspect = self._note(key)
            suspect.ran_s = max(suspect.ran_s, ran_s)
            suspect.deaths_alone += len(ran) == 1
        if len(ran) != 1:
            return False
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
    """Use of one engine, alone or with others.

    A request that must be alone keeps others out while it waits for the engine to be unused, and then while it is
    alone; neither lasts longer than its `alone_s`. Then all that waited go on.
    """

    def __init__(self) -> None:
        # The turn of the requests that must be alone. Its holder clears `_open`, which lets others in.
        self._turn = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @asynccontextmanager
    async def use(self, deadline: float, *, alone_s: float = 0.0) -> AsyncIterator[bool]:
        """Use the engine within the block, alone for its first `alone_s` seconds.

        Gives whether the request may have waited. Entering raises DeadlineExceeded.
        """
        alone = alone_s > 0
        waits = alone or not self._open.is_set()
        if waits:
            await self._wait(deadline, alone_s)

        def share() -> None:
            nonlocal alone
            alone = False
            self._end_turn()

        timer = asyncio.get_running_loop().call_later(alone_s, share) if alone else None
        self._users += 1
        self._unused.clear()
        try:
            yield waits
        finally:
            if timer is not None:
                timer.cancel()
            if alone:
                share()
            self._users -= 1
            if not self._users:
                self._unused.set()

    def _end_turn(self) -> None:
        self._open.set()
        self._turn.release()

    async def _wait(self, deadline: float, alone_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                if alone_s:
                    await self._take_turn(alone_s)
                    return
                while not self._open.is_set():
                    await self._open.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed while the request waited for its turn alone") from error

    async def _take_turn(self, alone_s: float) -> None:
        """Return when the engine is unused and others are kept out."""
        await self._turn.acquire()
        try:
            while not await self._keep_out(alone_s):
                self._open.set()
                # What is running takes long. Others are served for as long as they waited.
                await asyncio.sleep(alone_s)
        except BaseException:
            self._end_turn()
            raise

    async def _keep_out(self, longest_s: float) -> bool:
        """Keep others out until the engine is unused, and return whether it is in time."""
        self._open.clear()
        try:
            async with asyncio.timeout(longest_s):
                await self._unused.wait()
        except TimeoutError:
            return False
        return True
