"""What each team's calls to the cloud cost this month (UTC), counted where all gateways and processes share it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any, Protocol, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from backend_client.errors import CloudUnavailable, SpendCapReached
from backend_client.gateway.keys import Team

log = logging.getLogger("npu_gateway")
R = TypeVar("R")
_MILLION = 1_000_000
# A store that hangs must not hold requests up.
_PATIENCE_S = 1.0
_CONNECTIONS = 8
_KEPT_S = 70 * 24 * 3600
_ADD = """
local spent = tonumber(redis.call('GET', KEYS[1]) or '0')
if spent + ARGV[1] > tonumber(ARGV[2]) then return {0, spent} end
redis.call('SET', KEYS[1], string.format('%.0f', spent + ARGV[1]), 'EX', ARGV[3])
return {1, spent + ARGV[1]}
"""
# A store that was emptied in between must not hold less than nothing: that would lift the cap.
_GIVE_BACK = """
local spent = tonumber(redis.call('GET', KEYS[1]) or '0')
redis.call('SET', KEYS[1], string.format('%.0f', math.max(0, spent - ARGV[1])), 'EX', ARGV[2])
"""


class _Store(Protocol):
    """Whole millionths by account. Every method raises OSError, RedisError or sqlite3.Error when the store fails."""

    async def add(self, account: str, amount: int, most: int) -> tuple[bool, int]:
        """Add to an account unless that makes it more than `most`; whether it was added, and what it holds."""
        ...

    async def give_back(self, account: str, amount: int) -> None: ...

    async def total(self, account: str) -> int: ...

    async def close(self) -> None: ...


class _InRedis:
    """Nothing is retried: what was sent twice would be counted twice, or given back twice."""

    def __init__(self, url: str, patience_s: float) -> None:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=patience_s,
            socket_timeout=patience_s,
            socket_connect_timeout=patience_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = Redis.from_pool(pool)
        self._add = self._redis.register_script(_ADD)
        self._give_back = self._redis.register_script(_GIVE_BACK)

    async def add(self, account: str, amount: int, most: int) -> tuple[bool, int]:
        done, spent = await self._add(keys=[_key(account)], args=[amount, most, _KEPT_S])
        return bool(done), int(spent)

    async def give_back(self, account: str, amount: int) -> None:
        await self._give_back(keys=[_key(account)], args=[amount, _KEPT_S])

    async def total(self, account: str) -> int:
        return int(await self._redis.get(_key(account)) or 0)

    async def close(self) -> None:
        await self._redis.aclose()


def _key(account: str) -> str:
    return f"npu-gateway:spent:{account}"


class _InFile:
    """In the file of the keys, which the processes of one machine share; each of them writes from one thread."""

    def __init__(self, path: Path, patience_s: float) -> None:
        self._patience_s = patience_s
        self._thread = ThreadPoolExecutor(1, "spending")
        self._base = sqlite3.connect(path, timeout=patience_s, isolation_level=None, check_same_thread=False)
        self._base.execute(
            "CREATE TABLE IF NOT EXISTS spent (account TEXT PRIMARY KEY, amount INTEGER NOT NULL) STRICT"
        )

    async def add(self, account: str, amount: int, most: int) -> tuple[bool, int]:
        def run() -> tuple[bool, int]:
            spent = self._amount(account)
            if spent + amount > most:
                return False, spent
            self._set(account, spent + amount)
            return True, spent + amount

        return await self._at_once(run)

    async def give_back(self, account: str, amount: int) -> None:
        await self._at_once(lambda: self._set(account, max(0, self._amount(account) - amount)))

    async def total(self, account: str) -> int:
        return await self._at_once(lambda: self._amount(account))

    async def close(self) -> None:
        self._thread.shutdown()
        self._base.close()

    async def _at_once(self, work: Callable[[], R]) -> R:
        until = time.monotonic() + self._patience_s

        def run() -> R:
            # While others hold the file, those before this one have waited in turn.
            if time.monotonic() > until:
                raise TimeoutError
            with self._base:
                self._base.execute("BEGIN IMMEDIATE")
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _amount(self, account: str) -> int:
        row = self._base.execute("SELECT amount FROM spent WHERE account = ?", (account,)).fetchone()
        return int(row[0]) if row else 0

    def _set(self, account: str, amount: int) -> None:
        self._base.execute("INSERT OR REPLACE INTO spent VALUES (?, ?)", (account, amount))


class Spending:
    """The caps of teams. What a call may cost at most is added before it is sent, and the rest given back after it.

    A gateway that dies in between has spent the most. While the store fails, no team with a cap reaches the cloud, and
    `failed` is called for each refusal.
    """

    def __init__(
        self,
        store: str,
        keys: Path,
        failed: Callable[[], None],
        clock: Callable[[], float] = time.time,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        in_file = store == "memory://"
        self._store: _Store = _InFile(keys, patience_s) if in_file else _InRedis(store, patience_s)
        self._failed = failed
        self._clock = clock
        self._settling: set[asyncio.Task[Any]] = set()

    def purse(self, team: Team) -> TeamPurse | None:
        """What pays for a team's calls; None for a team without a cap."""
        return None if team.spend_cap is None else TeamPurse(self, team.name, team.spend_cap)

    async def reserve(self, team: str, cap: Decimal, most: Decimal) -> Callable[[Decimal], None]:
        """As `Purse.reserve`, for a team's cap of this month."""
        account = self._account(team)
        amount = _millionths(most)
        limit = int((cap * _MILLION).to_integral_value(ROUND_FLOOR))
        adding = self._kept(self._store.add(account, amount, limit))
        try:
            # To its end, although the caller may leave: what was added has to be known.
            added, spent = await asyncio.shield(adding)
        except asyncio.CancelledError:
            self._kept(self._undo(adding, account, amount))
            raise
        except (OSError, RedisError, sqlite3.Error) as error:
            self._failed()
            raise CloudUnavailable(
                f"the cloud was not asked: the store of the spend caps fails ({type(error).__name__})"
            ) from None
        if not added:
            left = Decimal(max(0, limit - spent)) / _MILLION
            raise SpendCapReached(
                f"the cloud was not asked: this may cost up to {most.normalize():f}, and of {team}'s spend cap of "
                f"{cap.normalize():f} a month {left.normalize():f} is left"
            )

        def settle(cost: Decimal) -> None:
            back = amount - _millionths(cost)
            if back > 0:
                self._kept(self._give_back(account, back))

        return settle

    async def spent(self, teams: Iterable[Team]) -> dict[str, tuple[Decimal, Decimal]]:
        """What each team with a cap has spent this month, and its cap. Raises OSError when the store fails."""
        found: dict[str, tuple[Decimal, Decimal]] = {}
        try:
            for team in teams:
                if team.spend_cap is not None:
                    spent = await self._store.total(self._account(team.name))
                    found[team.name] = (Decimal(spent) / _MILLION, team.spend_cap)
        except (OSError, RedisError, sqlite3.Error) as error:
            raise OSError(f"the store of the spend caps fails ({type(error).__name__})") from None
        return found

    async def close(self) -> None:
        """Wait for what is given back."""
        await asyncio.gather(*self._settling, return_exceptions=True)
        await self._store.close()

    async def _undo(self, adding: asyncio.Task[tuple[bool, int]], account: str, amount: int) -> None:
        with contextlib.suppress(OSError, RedisError, sqlite3.Error):
            added, _ = await adding
            if added:
                await self._give_back(account, amount)

    async def _give_back(self, account: str, amount: int) -> None:
        try:
            await self._store.give_back(account, amount)
        except (OSError, RedisError, sqlite3.Error) as error:
            self._failed()
            log.warning("a call counts at its most: the store of the spend caps fails (%s)", type(error).__name__)

    def _kept(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        task = asyncio.create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task

    def _account(self, team: str) -> str:
        return f"{datetime.fromtimestamp(self._clock(), UTC):%Y-%m}:{team}"


class TeamPurse:
    """Pays for the calls of one team."""

    def __init__(self, spending: Spending, team: str, cap: Decimal) -> None:
        self._spending, self._team, self._cap = spending, team, cap

    async def reserve(self, most: Decimal) -> Callable[[Decimal], None]:
        """As `Purse.reserve`."""
        return await self._spending.reserve(self._team, self._cap, most)


def _millionths(amount: Decimal) -> int:
    return int((max(Decimal(0), amount) * _MILLION).to_integral_value(ROUND_CEILING))
