"""Which requests are suspected of having killed an engine. Pure: the caller supplies the time.

An engine that dies with several requests on board leaves several suspects. They are run again in groups (`trials.py`).
If the engine dies again, the group is divided; the last suspect left is run alone. A request that was alone on an
engine at both of its deaths is refused, here and whenever it is sent again.

Most breaking requests break the engine before their first result, so a group makes room for the next one at that point.
A suspect that had results and was on board at death after death may break the engine late: it is `thorough`, and its
trial lasts until its end. Requests are identified by a digest of the engine's input, never by their text."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum

import msgspec

from worker_node.core.errors import DeadlineExceeded
from worker_node.engines.protocol import Job

_ALONE_LIMIT = 2
# Into so many groups. More are more trials, fewer are more restarts, which cost more: with 60 suspects and halves the
# innocent ones wait up to three times as long (docs/npu.md has figures).
_GROUPS = 8
# Once may be chance: others enter as soon as a suspect has had a result.
_LATE_LIMIT = 2
# So many times in a row suspects may take the engine down before any request is answered; then it is the engine. And so
# many times what was counted against the engine is taken back.
_BARREN_LIMIT = 8
_PARDONS = 4


class Standing(IntEnum):
    """How a request is to be run: with any others; in a group of suspects; alone; not at all."""

    CLEAR = 0
    SUSPECT = 1
    PRIME = 2
    REFUSED = 3


@dataclass(frozen=True, slots=True)
class Blame:
    """What ended an engine: a request (true), or the engine itself, as far as is known (false).

    `pardons`: so many earlier ends, which were counted against the engine, are now known for the request's.
    """

    request: bool = False
    pardons: int = 0

    def __bool__(self) -> bool:
        return self.request


BY_ITSELF = Blame()


@dataclass(frozen=True, slots=True)
class OnBoard:
    """A request that an engine held when it died; `fresh` if nothing had come of it in that life of the engine."""

    key: bytes
    fresh: bool


@dataclass(slots=True)
class _Record:
    """`company`: how many suspects of which nothing is known its next group may have; 0: it is run alone.

    `late`: so often it was on board of an engine that died, and had had results. `counted`: it was on board at so many
    deaths that were counted against the engine.
    """

    company: int = 0
    alone: int = 0
    late: int = 0
    counted: int = 0
    seen: float = 0.0

    @property
    def thorough(self) -> bool:
        return self.late >= _LATE_LIMIT

    @property
    def standing(self) -> Standing:
        if self.alone >= _ALONE_LIMIT:
            return Standing.REFUSED
        return Standing.PRIME if self.alone or not self.company else Standing.SUSPECT


@dataclass(slots=True)
class Suspects:
    """The suspects among the requests to one model, over all of its engines. Bounded, and forgotten after `memory_s`.

    While it is empty (falsy) every request is clear.
    """

    clock: Callable[[], float] = time.monotonic
    memory_s: float = 600.0
    capacity: int = 1024
    _records: OrderedDict[bytes, _Record] = field(default_factory=OrderedDict)
    _barren: int = 0

    def __len__(self) -> int:
        return len(self._records)

    def standing(self, key: bytes) -> Standing:
        """How to run a request."""
        record = self._records.get(key)
        if record is not None and self.clock() - record.seen >= self.memory_s:
            del self._records[key]
            record = None
        return Standing.CLEAR if record is None else record.standing

    def company(self, key: bytes) -> int:
        """How many suspects of which nothing is known may be in the group of this one."""
        record = self._records.get(key)
        return 1 if record is None else max(1, record.company)

    def thorough(self, key: bytes) -> bool:
        """Whether only the end of the request, and not its first result, shows that it is harmless."""
        record = self._records.get(key)
        return record is not None and record.thorough

    def answered(self, key: bytes) -> None:
        """Record that the request was answered to its end: it is harmless."""
        self._barren = 0
        self._records.pop(key, None)

    def died(self, held: Iterable[OnBoard], active: Collection[bytes] = (), *, preparing: bool = False) -> Blame:
        """An engine died with the requests in `held`, in a native call for those in `active` (none: it is not known).

        With `preparing` the call had nothing to do with the device, so that the request is to blame for certain.
        """
        entries = list(held)
        suspects = {entry.key: entry for entry in entries if entry.key in active}
        suspects = suspects or {entry.key: entry for entry in entries}
        unknown = {key for key, entry in suspects.items() if entry.fresh or self.thorough(key)}
        group = [key for key in unknown if self.standing(key) is Standing.SUSPECT]
        late = [key for key in suspects if key not in unknown and key in self._records]
        if len(suspects) == 1:
            (key,) = suspects
            suspected = self.standing(key) is not Standing.CLEAR
            record = self._record(key)
            record.alone += _ALONE_LIMIT if preparing else 1
            if preparing or not suspected:
                record.counted += not preparing
                return Blame(preparing)
            blame = self._by_suspects(entries)
            found = record.standing is Standing.REFUSED and self._barren <= _PARDONS
            return replace(blame, pardons=record.counted) if blame and found else blame
        if len(group) == len(unknown) > 0:
            # All others have been on board before without harm, as far as is known.
            for key in late:
                self._record(key).late += 1
            for key in group:
                record = self._record(key)
                record.company = _divided(min(record.company, len(group)))
            return self._by_suspects(entries)
        for key in late:
            self._record(key).late = _LATE_LIMIT
        if len(late) == len(suspects):
            # All were on board when the engine died before: it is one of them, whatever came of them since.
            return self._by_suspects(entries, late)
        for key in suspects:
            if key in late:
                continue
            known = self._records.get(key)
            most = len(suspects) if known is None else min(known.company, len(suspects))
            self._record(key).company = _divided(most)
        for key in suspects:
            if (kept := self._records.get(key)) is not None:
                kept.counted += 1
        return BY_ITSELF

    def _by_suspects(self, held: Iterable[OnBoard], late: Collection[bytes] = ()) -> Blame:
        """Suspects ended the engine again: blame them, unless nothing was ever answered in between."""
        proven = any(not (entry.fresh or entry.key in late or self.thorough(entry.key)) for entry in held)
        self._barren = 0 if proven else self._barren + 1
        return Blame(self._barren <= _BARREN_LIMIT)

    def clear(self) -> None:
        """The engine itself is to blame: suspect no request any more."""
        self._records.clear()
        self._barren = 0

    def _record(self, key: bytes) -> _Record:
        record = self._records.setdefault(key, _Record())
        record.seen = self.clock()
        self._records.move_to_end(key)
        if len(self._records) > self.capacity:
            self._records.popitem(last=False)
        return record


def _divided(count: int) -> int:
    """How large the groups are of `count` suspects that were together: 0 for one, which is run alone."""
    return -(-count // _GROUPS) if count > 1 else 0


def fingerprint(job: Job) -> bytes:
    """What tells a request from others: all that its engine is given but for the time and the room that it has."""
    return hashlib.blake2b(msgspec.msgpack.encode(job.timeless()), digest_size=16).digest()


# Which requests may be on an engine together while the cause of a death is sought. Pure, without a clock.
#
# Clear requests share the engine. Suspects enter in groups when no clear request is on board: a suspect whose `company`
# is n shares the engine with at most n suspects of unknown effect. Suspects that have proved harmless make room for the
# next ones; a group that kills the engine is divided (`suspicion.py`). The prime suspect enters an empty engine.
# Waiting
# suspects do not interrupt running requests; one that has waited long enough to be `urgent` keeps new ones out.

# Suspects first, since they have waited for a restart; the prime suspect last.
_ORDER = {Standing.SUSPECT: 0, Standing.CLEAR: 1, Standing.PRIME: 2}


@dataclass(eq=False, slots=True)
class Visit:
    """A request on the engine. `apart` until it has shown itself harmless, which is at its end if `thorough`.

    `company` is of use for suspects only, `urgent` for the prime one: it has waited for long.
    """

    standing: Standing
    company: int = 1
    thorough: bool = False
    urgent: bool = False
    apart: bool = field(init=False)

    def __post_init__(self) -> None:
        self.apart = self.standing is not Standing.CLEAR


@dataclass(slots=True)
class Trials:
    """The requests on one engine, those that wait for it, and the `coming` ones: suspects that wait for its restart."""

    inside: dict[Visit, None] = field(default_factory=dict)
    waiting: dict[Visit, None] = field(default_factory=dict)
    coming: Counter[int] = field(default_factory=Counter)
    # Those inside that are suspected, harmless or not.
    _suspects: int = 0

    @property
    def shared(self) -> bool:
        """Whether clear requests are on board."""
        return any(visit.standing is Standing.CLEAR for visit in self.inside)

    @property
    def going_on(self) -> bool:
        """Whether a suspect is tried or can be tried next."""
        if any(visit.apart for visit in self.inside):
            return True
        suspects_wait = any(visit.standing is Standing.SUSPECT for visit in self.waiting)
        return (suspects_wait or self.coming.total() > 0) and not self.shared

    def arrive(self, visit: Visit) -> bool:
        """A request comes; returns whether it enters at once, else it waits."""
        if self._may_enter(visit):
            self._enter(visit)
            return True
        self.waiting[visit] = None
        return False

    def leave(self, visit: Visit) -> None:
        """A request ends, whether it is on board or waits."""
        if visit in self.inside:
            del self.inside[visit]
            self._suspects -= visit.standing is not Standing.CLEAR
        else:
            self.waiting.pop(visit, None)

    def admit(self) -> list[Visit]:
        """Admit the requests that may enter now, and return them."""
        entered = []
        for visit in sorted(self.waiting, key=lambda visit: (_ORDER[visit.standing], -visit.company)):
            if self._may_enter(visit):
                del self.waiting[visit]
                self._enter(visit)
                entered.append(visit)
        return entered

    def _enter(self, visit: Visit) -> None:
        self.inside[visit] = None
        self._suspects += visit.standing is not Standing.CLEAR

    def _may_enter(self, visit: Visit) -> bool:
        if visit.standing is Standing.CLEAR and not (self._suspects or self.waiting or self.coming):
            return True
        if visit.standing is Standing.PRIME:
            return not self.inside
        if visit.standing is Standing.SUSPECT and visit.apart:
            return self._joins_group(visit)
        return not self.going_on and not any(other.urgent for other in self.waiting)

    def _joins_group(self, visit: Visit) -> bool:
        group = [other for other in self.inside if other.apart]
        if self.shared or any(other.standing is Standing.PRIME for other in group):
            return False
        # The larger its company may be, the less it is suspected, and the more are cleared before the next death.
        others = [other.company for other in self.waiting if other.standing is Standing.SUSPECT and other.apart]
        if any(company > visit.company for company in (*others, *+self.coming)):
            return False
        return len(group) < min([visit.company, *(other.company for other in group)])


# Admits requests to an engine as `trials.py` decides, and bounds how long each may wait.

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
