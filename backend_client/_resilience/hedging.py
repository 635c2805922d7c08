"""Hedging: an embedding that takes longer than most is sent to a second node as well, and the first answer counts."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from backend_client.options import HedgeOptions

R = TypeVar("R")


class Latencies:
    """The latencies of recent calls of one size. `percentile` is O(1), `add` O(log n) and a move of memory."""

    def __init__(self, options: HedgeOptions) -> None:
        self._options = options
        self._recent: deque[float] = deque(maxlen=options.samples)
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        """Record the latency of a call."""
        if len(self._recent) == self._options.samples:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(seconds)
        insort(self._sorted, seconds)

    def percentile(self) -> float | None:
        """Seconds that the configured share of calls stays below; None with too few samples to tell."""
        if self._options.percentile is None or len(self._sorted) < self._options.least:
            return None
        return self._sorted[min(len(self._sorted) - 1, int(len(self._sorted) * self._options.percentile))]


async def hedged(
    first: Callable[[], Awaitable[R]], second: Callable[[], Awaitable[R]], *, after: float, may: Callable[[], bool]
) -> R:
    """The first success of `first` and, if that takes longer than `after` seconds and `may` agrees then, `second`.

    The other is cancelled. When both fail, the error of `first` is raised: it knows the retries.
    """
    tasks = [asyncio.ensure_future(first())]
    try:
        done, _ = await asyncio.wait(tasks, timeout=after)
        if not done and may():
            tasks.append(asyncio.ensure_future(second()))
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None:
                    return task.result()
        return await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
