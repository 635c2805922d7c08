"""Responses that are kept for later turns: in memory, bounded in number, bytes and time, each for one key only."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

# What an object of Python takes besides its content, so that many small ones count as what they are.
_OVERHEAD = 200
_REFERENCE = 16


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
    def own_size(self) -> int:
        """The bytes that it takes without its items, which other responses may share."""
        return _OVERHEAD + len(self.response) + _REFERENCE * (len(self.input) + len(self.output))


def _size(item: StoredItem) -> int:
    return 2 * _OVERHEAD + len(item.id) + len(item.data)


class _Owned:
    """What one owner has stored, oldest first. Items that several responses share are there, and count, once."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, tuple[StoredResponse, float]] = OrderedDict()
        self.latest: dict[str, StoredItem] = {}
        self.size = 0
        self._uses: Counter[StoredItem] = Counter()

    def add(self, stored: StoredResponse, until: float) -> None:
        self.responses[stored.id] = (stored, until)
        self.size += stored.own_size
        for item in stored.items:
            self._uses[item] += 1
            self.latest[item.id] = item
            if self._uses[item] == 1:
                self.size += _size(item)

    def remove(self, response_id: str) -> None:
        stored, _ = self.responses.pop(response_id)
        self.size -= stored.own_size
        for item in stored.items:
            self._uses[item] -= 1
            if not self._uses[item]:
                del self._uses[item]
                self.size -= _size(item)
                if self.latest.get(item.id) == item:
                    del self.latest[item.id]


class ResponseStore:
    """Keeps responses by owner and id. Over a limit, the oldest of the owner that holds most goes first."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._owners: dict[bytes, _Owned] = {}

    @property
    def enabled(self) -> bool:
        """Whether anything is stored."""
        return self.limits.count > 0

    @property
    def count(self) -> int:
        """How many responses are stored."""
        return sum(len(owned.responses) for owned in self._owners.values())

    @property
    def size(self) -> int:
        """The bytes that they take."""
        return sum(owned.size for owned in self._owners.values())

    def put(self, owner: bytes, stored: StoredResponse) -> bool:
        """Store a response, in place of what has its id; False if it alone is over the limits."""
        self.delete(owner, stored.id)
        if not self.enabled or stored.own_size + sum(map(_size, set(stored.items))) > self.limits.size:
            return False
        self._owners.setdefault(owner, _Owned()).add(stored, self._clock() + self.limits.seconds)
        while self.count > self.limits.count or self.size > self.limits.size:
            self._evict(sparing=owner)
        return True

    def get(self, owner: bytes, response_id: str) -> StoredResponse | None:
        """A response of that owner."""
        self.expire()
        owned = self._owners.get(owner)
        return owned.responses[response_id][0] if owned is not None and response_id in owned.responses else None

    def items(self, owner: bytes, item_ids: Iterable[str]) -> dict[str, StoredItem]:
        """Those of the items that are part of a response of that owner."""
        self.expire()
        latest = self._owners[owner].latest if owner in self._owners else {}
        return {item_id: latest[item_id] for item_id in item_ids if item_id in latest}

    def delete(self, owner: bytes, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        self.expire()
        if response_id not in (self._owners[owner].responses if owner in self._owners else {}):
            return False
        self._remove(owner, response_id)
        return True

    def expire(self) -> None:
        """Forget what is too old."""
        now = self._clock()
        for owner, owned in list(self._owners.items()):
            while owned.responses and next(iter(owned.responses.values()))[1] <= now:
                self._remove(owner, next(iter(owned.responses)))

    def _remove(self, owner: bytes, response_id: str) -> None:
        owned = self._owners[owner]
        owned.remove(response_id)
        if not owned.responses:
            del self._owners[owner]

    def _evict(self, sparing: bytes) -> None:
        """Forget one response, but not the one that `sparing` has just stored."""
        crowded = self.count > self.limits.count
        shares = {
            owner: len(owned.responses) if crowded else owned.size
            for owner, owned in self._owners.items()
            if owner != sparing or len(owned.responses) > 1
        }
        owner = max(shares, key=lambda one: shares[one])
        self._remove(owner, next(iter(self._owners[owner].responses)))
