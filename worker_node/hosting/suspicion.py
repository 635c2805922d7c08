"""Which requests are suspected of having taken an engine down: pure, the clock is the caller's.

An engine that dies with several requests on board leaves several suspects. Run again one after another they clear
themselves, but for the one that takes the engine down again; that one is then run alone. A request that was alone on an
engine both times when an engine died twice is refused, here and whenever it is sent again.

Requests are known by a digest of what the engine is given, never by their text.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from worker_node.engines.messages import Job

_ALONE_LIMIT = 2


class Standing(IntEnum):
    """How a request is to be run: with any others; apart until it has shown itself harmless; alone; not at all."""

    CLEAR = 0
    SUSPECT = 1
    PRIME = 2
    REFUSED = 3


@dataclass(frozen=True, slots=True)
class OnBoard:
    """A request that an engine held when it died; `fresh` if nothing had come of it in that life of the engine."""

    key: bytes
    fresh: bool


@dataclass(slots=True)
class _Record:
    company: int = 0
    alone: int = 0
    seen: float = 0.0

    @property
    def standing(self) -> Standing:
        if self.alone >= _ALONE_LIMIT:
            return Standing.REFUSED
        return Standing.PRIME if self.alone or self.company > 1 else Standing.SUSPECT


@dataclass(slots=True)
class Suspects:
    """The suspects among the requests to one model, over all of its engines. Bounded, and forgotten after `memory_s`.

    While it is empty (falsy) every request is clear.
    """

    clock: Callable[[], float] = time.monotonic
    memory_s: float = 600.0
    capacity: int = 1024
    _records: OrderedDict[bytes, _Record] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._records)

    def standing(self, key: bytes) -> Standing:
        """How to run a request."""
        record = self._records.get(key)
        if record is not None and self.clock() - record.seen >= self.memory_s:
            del self._records[key]
            record = None
        return Standing.CLEAR if record is None else record.standing

    def answered(self, key: bytes) -> None:
        """The request was answered to its end: it is harmless."""
        self._records.pop(key, None)

    def died(self, held: Iterable[OnBoard], active: Collection[bytes] = (), *, preparing: bool = False) -> bool:
        """An engine died with the requests in `held`, in a native call for those in `active` (none: it is not known).

        With `preparing` the call had nothing to do with the device, so that the request is to blame for certain.
        Returns whether a request is to blame, and not the engine.
        """
        suspects = {entry.key: entry for entry in held if entry.key in active} if active else {}
        suspects = suspects or {entry.key: entry for entry in held}
        unproven = [key for key, entry in suspects.items() if entry.fresh and self.standing(key) is Standing.SUSPECT]
        fresh = sum(entry.fresh for entry in suspects.values())
        if len(suspects) == 1:
            (key,) = suspects
            known = self.standing(key) is not Standing.CLEAR
            self._record(key).alone += _ALONE_LIMIT if preparing else 1
            return known or preparing
        if len(unproven) == fresh == 1:
            # All others have been on board before without harm.
            self._record(unproven[0]).company += 1
            return True
        for key in suspects:
            self._record(key).company += 1
        return False

    def clear(self) -> None:
        """The engine itself is to blame: suspect no request any more."""
        self._records.clear()

    def _record(self, key: bytes) -> _Record:
        record = self._records.setdefault(key, _Record())
        record.seen = self.clock()
        self._records.move_to_end(key)
        if len(self._records) > self.capacity:
            self._records.popitem(last=False)
        return record


def fingerprint(job: Job) -> bytes:
    """What tells a request from others: all that its engine is given but for the time and the room that it has."""
    return hashlib.blake2b(msgspec.msgpack.encode(job.timeless()), digest_size=16).digest()
