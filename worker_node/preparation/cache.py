"""Results of preparation by content: each is computed once, however many requests need it at the same time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from worker_node.core.errors import BadRequest


@dataclass(slots=True)
class _Flight:
    """Work that `waiters` requests wait for."""

    task: asyncio.Task[str]
    waiters: int = 0


class ResultCache:
    """Texts by key, least recently used first out, at most `max_bytes` of them. A refusal is a result too."""

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes
        self._size = 0
        self._results: OrderedDict[bytes, str | tuple[type[BadRequest], str, str | None]] = OrderedDict()
        self._flights: dict[bytes, _Flight] = {}
        self.hits = 0
        self.misses = 0

    async def get(self, key: bytes, make: Callable[[], Awaitable[str]]) -> str:
        """The result for a key; `make` is called where there is none, and cancelled when its last caller leaves.

        Raises what `make` raises.
        """
        if key in self._results:
            self.hits += 1
            self._results.move_to_end(key)
            return _result(self._results[key])
        self.misses += 1
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(self._made(key, make)))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                self._flights.pop(key, None)
                flight.task.cancel()

    async def _made(self, key: bytes, make: Callable[[], Awaitable[str]]) -> str:
        task = asyncio.current_task()
        try:
            result = await make()
        except BadRequest as error:
            self._keep(key, (type(error), error.message, error.param))
            raise
        else:
            self._keep(key, result)
            return result
        finally:
            if (flight := self._flights.get(key)) is not None and flight.task is task:
                del self._flights[key]

    def _keep(self, key: bytes, result: str | tuple[type[BadRequest], str, str | None]) -> None:
        self._results[key] = result
        self._size += _bytes(key, result)
        while self._size > self._most:
            old, value = self._results.popitem(last=False)
            self._size -= _bytes(old, value)


def _result(kept: str | tuple[type[BadRequest], str, str | None]) -> str:
    if isinstance(kept, str):
        return kept
    kind, message, param = kept
    # A new one each time: an error carries what befell one request.
    raise kind(message, param=param)


def _bytes(key: bytes, result: str | tuple[type[BadRequest], str, str | None]) -> int:
    return len(key) + len(result if isinstance(result, str) else result[1]) + 100
