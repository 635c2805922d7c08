"""Finds waiting jobs whose deadline has passed, in O(log n) a job."""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass, field

_SLACK = 64


@dataclass(slots=True)
class Deadlines:
    """A heap of deadlines. Jobs that stopped waiting stay in it until they are due or outnumber the others."""

    _heap: list[tuple[float, int]] = field(default_factory=list)

    def add(self, job_id: int, deadline: float) -> None:
        """Add a job that waits; `deadline` is on the caller's clock."""
        heapq.heappush(self._heap, (deadline, job_id))

    def due(self, now: float, waiting: Container[int]) -> list[int]:
        """Remove and return the ids of the jobs in `waiting` whose deadline has passed, earliest first."""
        late: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            _, job_id = heapq.heappop(self._heap)
            # A job that was put back is in the heap twice, and comes out of it twice in a row.
            if job_id in waiting and late[-1:] != [job_id]:
                late.append(job_id)
        return late

    def compact(self, waiting: Container[int], count: int) -> None:
        """Forget the jobs that are not in `waiting`, which has `count` of them, if they are the most."""
        if len(self._heap) > 2 * count + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in waiting]
            heapq.heapify(self._heap)
