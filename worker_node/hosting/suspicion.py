"""Which requests are suspected of having killed an engine. Pure: the caller supplies the time.

An engine that dies with several requests on board leaves several suspects. They are run again in groups (`trials.py`).
If the engine dies again, the group is divided; the last suspect left is run alone. A request that was alone on an
engine at both of its deaths is refused, here and whenever it is sent again.

Most breaking requests break the engine before their first result, so a group makes room for the next one at that point.
A suspect that had results and was on board at death after death may break the engine late: it is `thorough`, and its
trial lasts until its end. Requests are identified by a digest of the engine's input, never by their text.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum

import msgspec

from worker_node.engines.messages import Job

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
