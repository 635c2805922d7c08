"""The queue before an engine that does one job at a time: pure, the clock is the caller's.

First in, first out within a priority, interactive before batch. A batch job that has waited `patience_s` counts as
interactive from then on and goes by its time of arrival: it is slowed, never starved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What the queue must know of a job. `deadline` is monotonic time."""

    @property
    def id(self) -> int: ...
    @property
    def deadline(self) -> float: ...
    @property
    def interactive(self) -> bool: ...


J = TypeVar("J", bound=Queued)


@dataclass(slots=True)
class WaitingLine(Generic[J]):
    """Jobs in order of arrival. The longest line is bounded by admission, so a scan is cheap."""

    patience_s: float = 10.0
    _line: list[tuple[float, J]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._line)

    def add(self, job: J, now: float) -> None:
        """A job arrived."""
        self._line.append((now, job))

    def remove(self, job_id: int) -> bool:
        """Take a job out; False if it is not in the line."""
        kept = [(arrived, job) for arrived, job in self._line if job.id != job_id]
        removed = len(kept) < len(self._line)
        self._line = kept
        return removed

    def expired(self, now: float) -> list[J]:
        """Take out and return all jobs that nobody waits for any more."""
        late = [job for _, job in self._line if job.deadline <= now]
        self._line = [(arrived, job) for arrived, job in self._line if job.deadline > now]
        return late

    def next(self, now: float) -> J | None:
        """Take out and return the job to do next; None if there is none."""
        urgent = (
            index
            for index, (arrived, job) in enumerate(self._line)
            if job.interactive or now - arrived >= self.patience_s
        )
        index = next(urgent, 0)
        return self._line.pop(index)[1] if self._line else None
