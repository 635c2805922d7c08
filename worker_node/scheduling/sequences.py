"""Which of the admitted generations hold one of the engine's sequences, as far as the edge process can know."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from worker_node.scheduling.shares import batch_sequences


@dataclass(slots=True, eq=False)
class AdmittedJob:
    """An admitted job. `limit` is its most new tokens; with `exact` it uses them all."""

    prefill: int
    limit: int
    exact: bool
    interactive: bool
    since: float
    # Where it stands among answers of its kind, from the longest (0) to the shortest (1), as far as anyone can tell.
    luck: float = 0.5
    generated: int = 0
    # When it last got a token, and for how long prompts had been computed by then.
    heard: float = 0.0
    heard_prefill_s: float = 0.0


def lanes() -> dict[bool, OrderedDict[AdmittedJob, None]]:
    """No jobs yet, by priority (False: batch), in order of arrival."""
    return {True: OrderedDict(), False: OrderedDict()}


@dataclass(slots=True)
class Sequences:
    """The jobs that hold the engine's `count` sequences, and those that wait for one. All is O(1), `taken_up` O(n)."""

    count: int
    serving: dict[AdmittedJob, None] = field(default_factory=dict)
    queued: dict[bool, OrderedDict[AdmittedJob, None]] = field(default_factory=lanes)
    _batch: int = 0

    def add(self, job: AdmittedJob, now: float) -> None:
        """Add a job that waits for a sequence; it gets one at once if one is free."""
        self.queued[job.interactive][job] = None
        self._fill(now)

    def remove(self, job: AdmittedJob, now: float) -> None:
        """Remove a job that ended."""
        self.queued[job.interactive].pop(job, None)
        if job in self.serving:
            self._leave(job)
            self._fill(now)

    def taken_up(self, job: AdmittedJob, pending: Mapping[bool, Container[AdmittedJob]]) -> None:
        """The engine turns out to have taken up this job: it has the sequence of the last that is still `pending`."""
        if job not in self.queued[job.interactive]:
            return
        del self.queued[job.interactive][job]
        self._serve(job)
        for other in reversed(self.serving):
            if len(self.serving) <= self.count:
                return
            if other in pending[other.interactive]:
                self._leave(other)
                self.queued[other.interactive][other] = None
                self.queued[other.interactive].move_to_end(other, last=False)
                return

    def _fill(self, now: float) -> None:
        """Give free sequences to the jobs that are next, as the engine does."""
        while len(self.serving) < self.count:
            lane = self.queued[True]
            if not lane and self._batch < batch_sequences(self.count):
                lane = self.queued[False]
            if not lane:
                return
            job, _ = lane.popitem(last=False)
            job.since = now
            self._serve(job)

    def _serve(self, job: AdmittedJob) -> None:
        self.serving[job] = None
        self._batch += not job.interactive

    def _leave(self, job: AdmittedJob) -> None:
        del self.serving[job]
        self._batch -= not job.interactive
