"""Responses that are kept for later turns: in memory, bounded in number, bytes and time, each for one key only."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# What an object of Python takes besides its content, so that many small ones count as what they are.
_OVERHEAD = 200


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """At most `count` responses of `size` bytes together, each for `seconds`. A count of 0 turns the store off."""

    count: int
    size: int
    seconds: float


class StoredItem(NamedTuple):
    """One item of a conversation, as JSON."""

    id: str
    data: bytes


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, the items that it answers (earlier turns included), and the items of its answer."""

    id: str
    status: str
    response: bytes
    input: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]

    @property
    def items(self) -> tuple[StoredItem, ...]:
        """What a response that follows this one begins with."""
        return self.input + self.output

    @property
    def size(self) -> int:
        """The bytes that it takes. Items of earlier turns count in each response that has them."""
        items = sum(2 * _OVERHEAD + len(item.id) + len(item.data) for item in self.items)
        return _OVERHEAD + len(self.response) + items


class ResponseStore:
    """Keeps responses by owner and id. Over a limit, the oldest of the owner that holds most goes first."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        # Of each owner, oldest first: the response, its size, and until when it is kept.
        self._owners: dict[bytes, OrderedDict[str, tuple[StoredResponse, int, float]]] = {}
        self.count = 0
        self.size = 0
        self._size_of: Counter[bytes] = Counter()

    @property
    def enabled(self) -> bool:
        return self.limits.count > 0

    def put(self, owner: bytes, stored: StoredResponse) -> bool:
        """Store a response, in place of what has its id; False if it alone is over the limits."""
        self.delete(owner, stored.id)
        size = stored.size
        if not self.enabled or size > self.limits.size:
            return False
        while self.count >= self.limits.count or self.size + size > self.limits.size:
            crowded = self.count >= self.limits.count
            largest = max(self._owners, key=lambda one: len(self._owners[one]) if crowded else self._size_of[one])
            self._remove(largest, next(iter(self._owners[largest])))
        self._owners.setdefault(owner, OrderedDict())[stored.id] = (stored, size, self._clock() + self.limits.seconds)
        self._account(owner, 1, size)
        return True

    def get(self, owner: bytes, response_id: str) -> StoredResponse | None:
        """A response of that owner."""
        self.expire()
        kept = self._owners.get(owner)
        return kept[response_id][0] if kept is not None and response_id in kept else None

    def items(self, owner: bytes, item_ids: Sequence[str]) -> dict[str, StoredItem]:
        """Those of the items that are part of a response of that owner, as they are in its latest."""
        self.expire()
        wanted, found = set(item_ids), dict[str, StoredItem]()
        for stored, _, _ in self._owners.get(owner, {}).values() if wanted else ():
            found |= {item.id: item for item in stored.items if item.id in wanted}
        return found

    def delete(self, owner: bytes, response_id: str) -> bool:
        """Delete a response; whether there was one."""
        self.expire()
        if response_id not in self._owners.get(owner, {}):
            return False
        self._remove(owner, response_id)
        return True

    def expire(self) -> None:
        """Delete what is too old."""
        now = self._clock()
        for owner, kept in list(self._owners.items()):
            while kept and kept[next(iter(kept))][2] <= now:
                self._remove(owner, next(iter(kept)))

    def _remove(self, owner: bytes, response_id: str) -> None:
        _, size, _ = self._owners[owner].pop(response_id)
        self._account(owner, -1, -size)
        if not self._owners[owner]:
            del self._owners[owner], self._size_of[owner]

    def _account(self, owner: bytes, count: int, size: int) -> None:
        self.count += count
        self.size += size
        self._size_of[owner] += size
