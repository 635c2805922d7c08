"""Which engines to load and unload now: a pure decision over what is wanted, what is in memory, and the clock.

Guarantees: a unit with requests is never unloaded; at most one load at a time on a device; no load that does not
fit its memory; units are evicted least recently used first, and only to make room for a load or to return to the
budget; a pinned unit is never evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

Key = tuple[str, str]


class UnitState(StrEnum):
    """What a unit's engine is doing. DOWN: its process has ended and is started again later; it keeps its memory."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    DOWN = "down"


class Why(StrEnum):
    EXPIRED = "it was idle for its keep-alive"
    ASKED = "unloading was asked for"
    ROOM = "another model needs its memory"
    PRESSURE = "the models together exceed the memory budget"


@dataclass(frozen=True, slots=True)
class Unit:
    """A model on a device, as the unit that is loaded and unloaded. Times are monotonic seconds."""

    key: Key
    device: str
    pool: str
    # Bytes in `pool`: measured while it is loaded, else estimated.
    memory: int
    state: UnitState
    last_use: float = 0.0
    # It is to be loaded; None if nothing asks for it.
    wanted_since: float | None = None
    # It has requests, those that wait for its load included.
    busy: bool = False
    pinned: bool = False
    # It is unloaded then if it is idle.
    keep_until: float | None = None
    # It is unloaded as soon as it is idle.
    unload_when_idle: bool = False

    @property
    def evictable(self) -> bool:
        return self.state is UnitState.READY and not self.busy and not self.pinned and self.wanted_since is None


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """A wanted unit that does not fit: it needs `need` bytes of its pool's `budget`, which the units `in_the_way` hold.

    Loads that are about to begin are among these. `waits`: it is loaded when enough of them have left.
    """

    key: Key
    need: int
    budget: int
    in_the_way: tuple[Key, ...]
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and when to decide again if nothing happens before."""

    loads: tuple[Key, ...] = ()
    unloads: tuple[tuple[Key, Why], ...] = ()
    refusals: tuple[DoesNotFit, ...] = ()
    decide_at: float | None = None


def plan_memory(units: Sequence[Unit], budgets: Mapping[str, int | None], now: float) -> Plan:
    """Return what to do with the units. `budgets` are bytes by pool; None or a missing pool is unlimited."""
    unloads = _expired(units, now)
    memory = _Memory(units, budgets, {key for key, _ in unloads})
    unloads += memory.relieve()
    loads: list[Key] = []
    refusals: list[DoesNotFit] = []
    loading = {unit.device for unit in units if unit.state is UnitState.LOADING}
    waiting = [unit for unit in units if unit.state is UnitState.UNLOADED and unit.wanted_since is not None]
    for unit in sorted(waiting, key=lambda unit: unit.wanted_since or 0.0):
        if (refusal := memory.never_fits(unit)) is not None:
            refusals.append(refusal)
        elif unit.device not in loading:
            evicted, refusal, fits = memory.make_room(unit)
            unloads += evicted
            if refusal is not None:
                refusals.append(refusal)
            elif fits:
                loading.add(unit.device)
                loads.append(unit.key)

    idle = (unit for unit in units if unit.state is UnitState.READY and not unit.busy)
    ends = [unit.keep_until for unit in idle if unit.keep_until is not None and unit.keep_until > now]
    return Plan(tuple(loads), tuple(unloads), tuple(refusals), min(ends, default=None))


def _expired(units: Iterable[Unit], now: float) -> list[tuple[Key, Why]]:
    expired: list[tuple[Key, Why]] = []
    for unit in units:
        if unit.state is not UnitState.READY or unit.busy or unit.wanted_since is not None:
            continue
        if unit.unload_when_idle:
            expired.append((unit.key, Why.ASKED))
        elif unit.keep_until is not None and unit.keep_until <= now:
            expired.append((unit.key, Why.EXPIRED))
    return expired


class _Memory:
    """The bytes of each pool while one decision is made. `leaving` are the units that this decision unloads."""

    def __init__(self, units: Sequence[Unit], budgets: Mapping[str, int | None], leaving: set[Key]) -> None:
        self._budgets = budgets
        self._leaving = leaving
        self._units = units
        self._claims: dict[str, list[Unit]] = {}

    def relieve(self) -> list[tuple[Key, Why]]:
        evicted: list[tuple[Key, Why]] = []
        for pool, budget in self._budgets.items():
            if budget is not None:
                excess = self._held(pool, staying=True) - budget
                evicted += [(unit.key, Why.PRESSURE) for unit in self._evict(pool, excess)]
        return evicted

    def never_fits(self, unit: Unit) -> DoesNotFit | None:
        """The refusal of a load that would not fit if every unit were unloaded that is not pinned, or is to leave."""
        budget = self._budgets.get(unit.pool)
        if budget is None:
            return None
        holding = [u for u in self._units if self._holds(u, unit.pool)]
        pinned = [u for u in holding if u.pinned and not u.unload_when_idle and not self._leaves(u)]
        if unit.memory <= budget - sum(u.memory for u in pinned):
            return None
        return DoesNotFit(unit.key, unit.memory, budget, tuple(u.key for u in pinned))

    def make_room(self, unit: Unit) -> tuple[list[tuple[Key, Why]], DoesNotFit | None, bool]:
        """What is evicted for a load, why it is refused, and whether it fits now.

        A load that waits until units have left claims their memory, so that later ones do not take it. One that waits
        until units become idle, nobody knows when, keeps nothing from the others.
        """
        budget = self._budgets.get(unit.pool)
        if budget is None:
            return [], None, True
        claims = self._claims.setdefault(unit.pool, [])
        claimed = sum(other.memory for other in claims)
        # Of what is leaving the memory is not free yet, but it will be without further evictions.
        short = unit.memory - (budget - claimed - self._held(unit.pool, staying=True))
        if short > sum(other.memory for other in self._evictable(unit.pool)):
            holding = [*(u for u in self._units if self._holds(u, unit.pool)), *claims]
            return [], DoesNotFit(unit.key, unit.memory, budget, tuple(u.key for u in holding), waits=True), False
        evicted = [(other.key, Why.ROOM) for other in self._evict(unit.pool, short)]
        claims.append(unit)
        return evicted, None, unit.memory <= budget - claimed - self._held(unit.pool, staying=False)

    def _evict(self, pool: str, short: int) -> list[Unit]:
        evicted: list[Unit] = []
        for unit in self._evictable(pool):
            if short <= 0:
                break
            short -= unit.memory
            self._leaving.add(unit.key)
            evicted.append(unit)
        return evicted

    def _evictable(self, pool: str) -> list[Unit]:
        """Least recently used first."""
        free = [u for u in self._units if u.pool == pool and u.evictable and u.key not in self._leaving]
        return sorted(free, key=lambda unit: unit.last_use)

    def _held(self, pool: str, *, staying: bool) -> int:
        """Bytes that are taken now; with `staying` without what is being unloaded."""
        holding = (unit for unit in self._units if self._holds(unit, pool))
        return sum(unit.memory for unit in holding if not (staying and self._leaves(unit)))

    def _leaves(self, unit: Unit) -> bool:
        return unit.key in self._leaving or unit.state is UnitState.UNLOADING

    @staticmethod
    def _holds(unit: Unit, pool: str) -> bool:
        return unit.pool == pool and unit.state is not UnitState.UNLOADED
