"""What the cloud cost each team with a cap this month (UTC), counted where all gateways and processes share it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import UTC, datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from backend_client.errors import CloudUnavailable, SpendCapReached
from backend_client.gateway.keys import KeyFile, Team
from backend_client.gateway.limits import StoreGuard
from backend_client.http.messages import SpendLimit

log = logging.getLogger("npu_gateway")
R = TypeVar("R")
# A billionth: a text of a few tokens costs some of them.
_UNIT = Decimal("1e-9")
# A store that hangs must not hold requests up.
_PATIENCE_S = 1.0
# Between two attempts to settle while the store fails.
_PAUSE_S = 1.0
_CONNECTIONS = 8
_MOST_SETTLED = 500
_KEPT_S = 70 * 24 * 3600
_GIVEN_BACK_S = 24 * 3600
# The sums are Redis's integers: Lua's numbers are exact up to 2^53 only.
_RESERVE = """
local spent = redis.call('GET', KEYS[1]) or '0'
if redis.call('EXISTS', KEYS[2]) == 1 or spent + ARGV[1] > tonumber(ARGV[2]) then return {0, spent} end
redis.call('INCRBY', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[3])
return {1, spent}
"""
# What is given back before it was reserved is marked: after a time-out both may still be on their way.
_SETTLE = """
local reserved = redis.call('GET', KEYS[2])
if not reserved then redis.call('SET', KEYS[2], 'given back', 'EX', ARGV[2]) end
if not reserved or reserved == 'given back' then return 0 end
redis.call('DEL', KEYS[2])
if redis.call('EXISTS', KEYS[1]) == 1 then
    redis.call('DECRBY', KEYS[1], reserved)
    redis.call('INCRBY', KEYS[1], ARGV[1])
end
return 1
"""


# By reservation: its account, and what was spent.
Costs: TypeAlias = Mapping[str, tuple[str, int]]


class _InRedis:
    """Whole billionths by account. Each method may be repeated, and raises OSError or RedisError when the store fails.

    A reservation has an id, which is never used again. One that was settled cannot be made any more, so a reservation
    whose outcome is not known is given back by settling it at 0.
    """

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
        self._reserve = self._redis.register_script(_RESERVE)
        self._settle = self._redis.register_script(_SETTLE)

    async def reserve(self, account: str, reservation: str, amount: int, most: int) -> tuple[bool, int]:
        """Reserve unless the account would have more than `most`; whether it was done, and what was spent before."""
        done, spent = await self._reserve(keys=_keys(account, reservation), args=[amount, most, _KEPT_S])
        return bool(done), int(spent)

    async def settle(self, costs: Costs) -> None:
        """Count these costs in place of what was reserved."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for reservation, (account, cost) in costs.items():
                await self._settle(keys=_keys(account, reservation), args=[cost, _GIVEN_BACK_S], client=pipe)
            await pipe.execute()

    async def total(self, account: str) -> int:
        return int(await self._redis.get(_keys(account, "")[0]) or 0)

    async def close(self) -> None:
        await self._redis.aclose()


def _keys(account: str, reservation: str) -> list[str]:
    return [f"npu-gateway:spent:{account}", f"npu-gateway:reserved:{reservation}"]


class _InFile:
    """The same in the file of the keys, which the processes of one machine share.

    Reservations and settlements take turns in the order of their calls, so what is settled was reserved before.
    """

    def __init__(self, file: KeyFile) -> None:
        self._file = file
        self._asked: dict[str, tuple[str, int, int]] = {}
        self._next: asyncio.Task[dict[str, tuple[bool, int]]] | None = None
        self._turn = asyncio.Lock()

    async def reserve(self, account: str, reservation: str, amount: int, most: int) -> tuple[bool, int]:
        self._asked[reservation] = account, amount, most
        if self._next is None:
            self._next = asyncio.create_task(self._reserve_all())
        return (await asyncio.shield(self._next))[reservation]

    async def _reserve_all(self) -> dict[str, tuple[bool, int]]:
        # A commit takes milliseconds, so all who ask during one share the next.
        async with self._turn:
            asked, self._asked, self._next = self._asked, {}, None

            def work() -> dict[str, tuple[bool, int]]:
                with self._file.transaction():
                    return {reservation: self._reserve(reservation, *values) for reservation, values in asked.items()}

            return await self._file.run(work)

    def _reserve(self, reservation: str, account: str, amount: int, most: int) -> tuple[bool, int]:
        spent = self._spent(account)
        if spent + amount > most:
            return False, spent
        self._file.rows("INSERT INTO reservations VALUES (?, ?, ?)", reservation, account, amount)
        self._add(account, amount)
        return True, spent

    async def settle(self, costs: Costs) -> None:
        def work() -> None:
            with self._file.transaction():
                for reservation, (account, cost) in costs.items():
                    for row in self._file.rows("DELETE FROM reservations WHERE id = ? RETURNING amount", reservation):
                        self._add(account, cost - row["amount"])

        # After the reservations that wait for their turn: one of these may be settled here, since its caller left.
        async with self._turn:
            await self._file.run(work)

    async def total(self, account: str) -> int:
        return await self._file.run(self._spent, account)

    async def close(self) -> None:
        """The file is closed by its owner."""

    def _spent(self, account: str) -> int:
        rows = self._file.rows("SELECT amount FROM spent WHERE account = ?", account)
        return int(rows[0]["amount"]) if rows else 0

    def _add(self, account: str, amount: int) -> None:
        self._file.rows(
            "INSERT INTO spent VALUES (?, ?) ON CONFLICT (account) DO UPDATE SET amount = amount + excluded.amount",
            *(account, amount),
        )


class Spending:
    """The caps of teams. The most that a call may cost is reserved before it is sent, and settled at its cost after it.

    A gateway that dies in between has spent the most. While the store fails, no team with a cap reaches the cloud,
    `failed` is called for each refusal, and what is to be settled is kept until the store answers.
    """

    def __init__(
        self,
        store: str,
        file: KeyFile,
        failed: Callable[[], None],
        clock: Callable[[], float] = time.time,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._store = _InFile(file) if store == "memory://" else _InRedis(store, patience_s)
        self._guard = StoreGuard("the spend caps", failed)
        self._clock = clock
        self._patience_s = patience_s
        self._unsettled: dict[str, tuple[str, int]] = {}
        self._settling: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._asking: set[asyncio.Task[Any]] = set()

    def limit(self, team: Team) -> SpendLimit | None:
        return None if team.spend_cap is None else partial(self._reserve, team.name, team.spend_cap)

    async def _reserve(self, team: str, cap: Decimal, most: Decimal) -> Callable[[Decimal], None]:
        month = datetime.fromtimestamp(self._clock(), UTC)
        account, reservation, amount = _account(month, team), secrets.token_hex(16), _units(most)
        limit = int((cap / _UNIT).to_integral_value(ROUND_FLOOR))
        try:
            with self._guard.asking():
                added, spent = await self._reserved(account, reservation, amount, limit)
        except OSError as error:
            raise CloudUnavailable(f"the cloud was not asked: {error}") from None
        if not added:
            left = max(0, limit - spent) * _UNIT
            begins = f"{month.year + month.month // 12}-{month.month % 12 + 1:02d}-01"
            raise SpendCapReached(
                f"the cloud was not asked: this may cost up to {most.normalize():f}, and of {team}'s spend cap of "
                f"{cap.normalize():f} a month {left.normalize():f} is left; the next month begins on {begins} (UTC)"
            )
        return lambda cost: self._settle(account, reservation, min(amount, _units(cost)))

    async def _reserved(self, account: str, reservation: str, amount: int, limit: int) -> tuple[bool, int]:
        if amount > limit:
            # It may be more than a store can hold.
            return False, await self._ask(self._store.total(account))
        try:
            return await self._ask(self._store.reserve(account, reservation, amount, limit))
        except BaseException:
            # Whether it was added is not known.
            self._settle(account, reservation, 0)
            raise

    async def _ask(self, work: Coroutine[Any, Any, R]) -> R:
        """What the store answers in time. It is asked to the end, also when the caller leaves: a client of Redis that
        is cancelled may return instead.
        """
        task = asyncio.create_task(work)
        self._asking.add(task)
        task.add_done_callback(self._answered)
        done, _ = await asyncio.wait([task], timeout=self._patience_s)
        if not done:
            raise TimeoutError
        return await task

    def _answered(self, task: asyncio.Task[Any]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            # Retrieved, so that it is not logged when the caller has left.
            task.exception()

    async def spent(self, teams: Iterable[Team]) -> dict[str, tuple[Decimal, Decimal]]:
        """What each team with a cap has spent this month, and its cap. Raises OSError when the store fails."""
        month = datetime.fromtimestamp(self._clock(), UTC)
        caps = {team.name: team.spend_cap for team in teams if team.spend_cap is not None}
        try:
            async with asyncio.timeout(self._patience_s):
                return {
                    name: (await self._ask(self._store.total(_account(month, name))) * _UNIT, cap)
                    for name, cap in caps.items()
                }
        except (OSError, RedisError) as error:
            raise OSError(f"the store of the spend caps fails ({type(error).__name__})") from None

    async def close(self) -> None:
        """Settle what is to be settled, unless the store fails."""
        self._closing.set()
        if self._settling is not None:
            await asyncio.wait([self._settling])
        if self._unsettled:
            log.warning("%d calls count at their most: the store of the spend caps fails", len(self._unsettled))
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._store.close()

    def _settle(self, account: str, reservation: str, cost: int) -> None:
        self._unsettled[reservation] = account, cost
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._settle_all())

    async def _settle_all(self) -> None:
        while self._unsettled:
            # All that there is at once: one after another they would not keep up with the calls.
            costs = dict(islice(self._unsettled.items(), _MOST_SETTLED))
            try:
                await self._ask(self._store.settle(costs))
                for reservation in costs:
                    del self._unsettled[reservation]
            except (OSError, RedisError):
                if self._closing.is_set():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_S):
                        await self._closing.wait()


def _account(month: datetime, team: str) -> str:
    return f"{month:%Y-%m}:{team}"


def _units(amount: Decimal) -> int:
    return int((max(Decimal(0), amount) / _UNIT).to_integral_value(ROUND_CEILING))
