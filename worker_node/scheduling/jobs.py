"""The queue before a generation engine: two priorities, weighted service. No device, no clock of its own."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from worker_node.scheduling.deadlines import Deadlines
from worker_node.scheduling.shares import BatchCredit


class Queued(Protocol):
    """What the queue must know of a job. `deadline` is on the caller's clock; sizes are in tokens."""

    @property
    def id(self) -> int: ...
    @property
    def deadline(self) -> float: ...
    @property
    def interactive(self) -> bool: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...


J = TypeVar("J", bound=Queued)


@dataclass(frozen=True, slots=True)
class Pick(Generic[J]):
    """The job to run next. `owed` is set for a batch job that goes before interactive ones by its guaranteed share."""

    job: J
    owed: bool = False


@dataclass(slots=True)
class JobQueue(Generic[J]):
    """Waiting jobs: first in, first out within a priority; every operation is O(log n) or better."""

    credit: BatchCredit = field(default_factory=BatchCredit)
    _interactive: OrderedDict[int, J] = field(default_factory=OrderedDict)
    _batch: OrderedDict[int, J] = field(default_factory=OrderedDict)
    _deadlines: Deadlines = field(default_factory=Deadlines)

    def __len__(self) -> int:
        return len(self._interactive) + len(self._batch)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._interactive or job_id in self._batch

    @property
    def interactive_waiting(self) -> int:
        """How many interactive jobs wait."""
        return len(self._interactive)

    def add(self, job: J, *, first: bool = False) -> None:
        """A job begins to wait; `first` puts it before the others of its priority."""
        lane = self._interactive if job.interactive else self._batch
        lane[job.id] = job
        if first:
            lane.move_to_end(job.id, last=False)
        self._deadlines.add(job.id, job.deadline)

    def remove(self, job_id: int) -> bool:
        """Take a job out; False if it does not wait."""
        if self._interactive.pop(job_id, None) is None and self._batch.pop(job_id, None) is None:
            return False
        self._tidy()
        return True

    def expired(self, now: float) -> list[J]:
        """Take out and return all jobs whose deadline has passed."""
        late = [self._interactive.get(i) or self._batch[i] for i in self._deadlines.due(now, self)]
        for job in late:
            self.remove(job.id)
        return late

    def next(self, *, batch: bool = True) -> Pick[J] | None:
        """Take out the job to run next; None if none waits, or only batch jobs do and `batch` forbids them."""
        owed = batch and self._batch_is_owed()
        if not owed and self._interactive:
            _, job = self._interactive.popitem(last=False)
        elif batch and self._batch:
            _, job = self._batch.popitem(last=False)
            if owed:
                # All that it may use: what it leaves is given back when it ends.
                self.credit.charge(job.prompt_tokens + job.max_new_tokens)
        else:
            return None
        self._tidy()
        return Pick(job, owed)

    def served(self, tokens: int) -> None:
        """An interactive job got so many tokens of work."""
        if self._batch:
            self.credit.interactive_served(tokens)

    def _batch_is_owed(self) -> bool:
        if not self._batch or not self._interactive:
            return False
        oldest = next(iter(self._batch.values()))
        return self.credit.pays_for(oldest.prompt_tokens)

    def _tidy(self) -> None:
        if not self._batch:
            self.credit.nothing_waits()
        self._deadlines.compact(self, len(self))
