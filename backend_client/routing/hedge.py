"""Hedging: an embedding that takes longer than most is sent to a second node as well, and the first answer counts.

Off unless `hedge_percentile` is set.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable

from backend_client.options import HedgeOptions
from backend_client.results import EmbedBatch

_Ask = Callable[[], Awaitable[EmbedBatch]]


class Hedging:
    """Knows how long calls take, by the size of the request in powers of two: a batch is not slow for taking longer
    than a single text.
    """

    def __init__(self, options: HedgeOptions) -> None:
        self._latencies = defaultdict[int, Latencies](lambda: Latencies(options))

    async def run(self, texts: int, first: _Ask, second: _Ask, *, may: Callable[[], bool]) -> EmbedBatch:
        """The first success of `first` and, if that takes longer than most calls and `may` agrees then, `second`.

        The other is cancelled. When both fail, the error of `first` is raised: it knows the retries.
        """
        latencies = self._latencies[texts.bit_length()]
        after = latencies.percentile()
        batch = await first() if after is None else await _either(first, second, after, may)
        latencies.add(batch.attempts[-1].duration)
        return batch


async def _either(first: _Ask, second: _Ask, after: float, may: Callable[[], bool]) -> EmbedBatch:
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
