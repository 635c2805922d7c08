"""Responses that are kept for later turns: in memory, bounded in number, bytes and time, each for one key only."""

from __future__ import annotations

import time
from collections import OrderedDict
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
    """Keeps responses by owner and id. Over a limit, the oldest goes first."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        # Oldest first: the response, its size, and until when it is kept.
        self._kept: OrderedDict[tuple[bytes, str], tuple[StoredResponse, int, float]] = OrderedDict()
        self.size = 0

    @property
    def enabled(self) -> bool:
        return self.limits.count > 0

    @property
    def count(self) -> int:
        """How many responses are kept."""
        return len(self._kept)

    def put(self, owner: bytes, stored: StoredResponse) -> bool:
        """Store a response, in place of what has its id; False if it alone is over the limits."""
        self.delete(owner, stored.id)
        size = stored.size
        if not self.enabled or size > self.limits.size:
            return False
        while self.count >= self.limits.count or self.size + size > self.limits.size:
            self._remove(next(iter(self._kept)))
        self._kept[owner, stored.id] = (stored, size, self._clock() + self.limits.seconds)
        self.size += size
        return True

    def get(self, owner: bytes, response_id: str) -> StoredResponse | None:
        """A response of that owner."""
        self.expire()
        kept = self._kept.get((owner, response_id))
        return None if kept is None else kept[0]

    def items(self, owner: bytes, item_ids: Sequence[str]) -> dict[str, StoredItem]:
        """Those of the items that are part of a response of that owner, as they are in its latest."""
        self.expire()
        wanted, found = set(item_ids), dict[str, StoredItem]()
        for (whose, _), (stored, _, _) in self._kept.items() if wanted else ():
            if whose == owner:
                found |= {item.id: item for item in stored.items if item.id in wanted}
        return found

    def delete(self, owner: bytes, response_id: str) -> bool:
        """Delete a response; whether there was one."""
        self.expire()
        if (owner, response_id) not in self._kept:
            return False
        self._remove((owner, response_id))
        return True

    def expire(self) -> None:
        """Delete what is too old."""
        now = self._clock()
        while self._kept and self._kept[oldest := next(iter(self._kept))][2] <= now:
            self._remove(oldest)

    def _remove(self, key: tuple[bytes, str]) -> None:
        _, size, _ = self._kept.pop(key)
        self.size -= size
