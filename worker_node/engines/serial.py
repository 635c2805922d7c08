"""The base of engines that run one job at a time, each in one native call that releases the GIL."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Generic

from worker_node.engines.protocol import EngineStats, Failed, Inbox, Outbox
from worker_node.scheduling.prompts import J, JobQueue


class SerialRunner(ABC, Generic[J]):
    """All of a `Runner` but loading and the run of a job, during which commands are taken in between two tokens.

    A derived class loads `_pipeline`. While it runs `_current`, `_cancelled` says that its caller has left;
    `_generated` are the tokens that it has generated so far.
    """

    _pipeline: Any

    def __init__(self) -> None:
        self._queue: JobQueue[J] = JobQueue()
        self._current: J | None = None
        self._cancelled = False
        self._generated = 0

    @abstractmethod
    def _run(self, job: J, emit: Outbox, poll: Inbox) -> None:
        """Run a job to its end. Raises DeviceBroken for a failure of the device."""

    @property
    def has_work(self) -> bool:
        return len(self._queue) > 0

    @property
    def wake_fd(self) -> None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(waiting=len(self._queue), running=int(self._current is not None))

    def submit(self, job: J) -> None:
        self._queue.add(job)

    def cancel(self, job_id: int) -> None:
        if self._current is not None and self._current.id == job_id:
            self._cancelled = True
        else:
            self._queue.remove(job_id)

    def step(self, emit: Outbox, poll: Inbox) -> None:
        for late in self._queue.expired(time.monotonic()):
            emit(Failed(late.job.id, "deadline_exceeded", "the deadline passed while the request was queued"))
        pick = self._queue.next()
        if pick is None:
            return
        self._current, self._cancelled, self._generated = pick.job, False, 0
        try:
            self._run(pick.job, emit, poll)
        finally:
            self._current = None
            self._queue.computed(pick, pick.job.prompt_tokens + self._generated)

    def close(self) -> None:
        del self._pipeline
