"""Runs of encoder engines: infer requests that the device works on at the same time, beside the engine's loop."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import openvino as ov

from worker_node.core.types import Busy
from worker_node.devices.blobs import brief
from worker_node.devices.npu import OverlappingRuns, Share, busy_meter
from worker_node.encoders.jobs import ATTENTION_MASK, INPUT_IDS, TOKEN_TYPES, RowJob, RowResult, Throughput
from worker_node.engines.protocol import (
    TOKEN_DTYPE,
    VECTOR_DTYPE,
    DeviceBroken,
    EngineSpec,
    EngineStats,
    Failed,
    Inbox,
    Outbox,
    OutcomeBatch,
    Running,
)
from worker_node.scheduling.texts import BatchLimits, TextQueue, Waiting


@dataclass(slots=True)
class _Open:
    """A job with missing rows."""

    job: RowJob
    rows: list[npt.NDArray[np.int32]]
    missing: int
    waiting: int
    vectors: npt.NDArray[np.float32] | None = None
    started: float | None = None
    device_tokens: float = 0.0
    share: Share = field(default_factory=Share)


@dataclass(slots=True, eq=False)
class Slot:
    """An infer request and what it is running. While it is idle it is in the list `home`."""

    request: ov.InferRequest
    home: list[Slot]
    batch: list[Waiting] = field(default_factory=list)
    inputs: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    tokens: int = 0
    started: float = 0.0


class OverlappingRunner:
    """The base of encoder engines: all jobs that an engine holds, and the way of their rows through runs that overlap.

    When a run fails, no other is started. Those that are active still give their answers; then the engine ends, and
    only the jobs of failed runs are suspects.
    """

    jobs = RowJob

    def __init__(self, spec: EngineSpec, *, limits: BatchLimits, rows: int | None = None) -> None:
        """A run has `rows` rows; None is as many as it has texts."""
        self.queue = TextQueue()
        self.throughput = Throughput()
        self._runs = self._rows = 0
        self._open: dict[int, _Open] = {}
        # No deadline of an open job is before this.
        self._soonest = math.inf

        self._device = spec.device
        self._limits = limits
        self._static_rows = rows
        self._names: frozenset[str] = frozenset()
        self._meter = OverlappingRuns(busy_meter(None, spec.energy_meter(), stand_in=False))

        self._active: list[Slot] = []
        self._said: list[int] = []
        self._failure: str | None = None
        self._failed_jobs: set[int] = set()

        # deque.append is atomic, so OpenVINO's threads hand over finished slots without a lock; the socket
        # wakes the engine's loop: on Windows `select` takes nothing else.
        self._finished: deque[Slot] = deque()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self.wake_fd = self._wake.fileno()

    @abstractmethod
    def _has_room(self) -> bool:
        """Whether the next run can start now; one text at least waits."""

    @abstractmethod
    def _next_run(self, now: float) -> tuple[Slot, list[Waiting]] | None:
        """An idle slot and the texts that it is to run, taken out of the queue; None: no memory for another run."""

    def _saturated(self) -> bool:
        """Whether the device has as much as it can take, so that its speed can be measured."""
        return len(self.queue) > 0

    def _can_start(self) -> bool:
        return self._failure is None and len(self.queue) > 0 and self._has_room()

    @property
    def has_work(self) -> bool:
        return bool(self._finished) or self._can_start()

    def stats(self) -> EngineStats:
        """How many texts wait and run, how many runs there were, and how long the oldest one has taken."""
        oldest = min(self._active, key=lambda slot: slot.started, default=None)
        taken = None if oldest is None else (oldest.tokens, time.monotonic() - oldest.started)
        running = sum(len(slot.batch) for slot in self._active)
        return EngineStats(len(self.queue), running, self._runs, self._rows, oldest_run=taken)

    def submit(self, job: RowJob) -> None:
        tokens = np.frombuffer(job.tokens, TOKEN_DTYPE)
        rows = np.split(tokens, np.cumsum(job.lengths)[:-1])
        self._open[job.id] = _Open(job, rows, missing=len(rows), waiting=len(rows))
        self._soonest = min(self._soonest, job.deadline)
        for row, length in enumerate(job.lengths):
            self.queue.add(Waiting(job.id, row, length, job.interactive))

    def cancel(self, job_id: int) -> None:
        """Cancel a job: its waiting rows are dropped, the vectors of its running rows ignored."""
        job = self._open.pop(job_id, None)
        if job is not None and job.waiting:
            for row in range(len(job.rows)):
                self.queue.remove(job_id, row)

    def _expire(self, now: float, emit: Outbox) -> None:
        """Fail the jobs whose deadline passed while rows of them waited."""
        if now < self._soonest:
            return
        late = [job_id for job_id, held in self._open.items() if held.waiting and held.job.deadline <= now]
        ahead = (held.job.deadline for held in self._open.values() if held.job.deadline > now)
        self._soonest = min(ahead, default=math.inf)
        for job_id in late:
            self.cancel(job_id)
            emit(Failed(job_id, "deadline_exceeded", "the deadline passed while the request was queued"))

    def take(self, now: float, *, free_slots: int = 1) -> list[Waiting]:
        """Take the rows of the next run out of the queue; see `TextQueue.take`."""
        batch = self.queue.take(self._limits, free_slots)
        for waiting in batch:
            job = self._open[waiting.job_id]
            job.waiting -= 1
            if job.started is None:
                job.started = now
        return batch

    def _inputs(self, batch: Sequence[Waiting], shape: tuple[int, int]) -> dict[str, npt.NDArray[np.int64]]:
        """The tensors of a run, int64 of `shape` (rows, length), by the names of the model's inputs.

        The batch is in the first rows. Unused rows attend to one token, since a mean over none is not a number.
        """
        ids, mask, types = (np.zeros(shape, np.int64) for _ in range(3))
        for i, waiting in enumerate(batch):
            held = self._open[waiting.job_id]
            ids[i, : waiting.length] = held.rows[waiting.row]
            mask[i, : waiting.length] = 1
            if held.job.second:
                types[i, held.job.second[waiting.row] : waiting.length] = 1

        mask[len(batch) :, 0] = 1
        inputs = {INPUT_IDS: ids, ATTENTION_MASK: mask}
        return inputs | {TOKEN_TYPES: types} if TOKEN_TYPES in self._names else inputs

    def _finish(
        self, batch: Sequence[Waiting], output: npt.NDArray[np.float32], now: float, tokens: int, busy: Busy
    ) -> Iterator[RowResult]:
        """Take in the output of a run (row i is that of `batch[i]`); yields the results of the completed jobs.

        The run computed `tokens`, rows times padded length, and took `busy`.
        """
        self._runs += 1
        self._rows += len(batch)
        self.throughput.run_ended(tokens, now)
        touched: dict[int, _Open] = {}
        for i, waiting in enumerate(batch):
            job = self._open.get(waiting.job_id)
            if job is None:
                continue
            if job.vectors is None:
                job.vectors = np.empty((len(job.rows), output.shape[1]), VECTOR_DTYPE)
            job.vectors[waiting.row] = output[i]
            job.missing -= 1
            job.device_tokens += tokens / len(batch)
            job.share.add(busy, len(batch))
            touched[waiting.job_id] = job

        for job_id, job in touched.items():
            if job.missing == 0 and job.vectors is not None and job.started is not None:
                del self._open[job_id]
                yield RowResult(
                    job_id,
                    job.vectors.tobytes(),
                    job.started,
                    now - job.started,
                    job.share.rounded(),
                    round(job.device_tokens),
                    *self.throughput.take(),
                )

    def new_slot(self, create: Callable[[], ov.InferRequest], home: list[Slot]) -> Slot:
        slot = Slot(create(), home)
        slot.request.set_callback(self._on_finished, slot)
        home.append(slot)
        return slot

    def _on_finished(self, slot: Slot) -> None:
        # Runs in a thread of OpenVINO's, where an exception would end the process: it only takes notes.
        self._finished.append(slot)
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            self._waker.send(b"1")

    def step(self, emit: Outbox, poll: Inbox) -> None:  # noqa: ARG002  (a run never blocks this loop)
        outcomes = self._collect()
        now = time.monotonic()
        self._expire(now, emit)
        starting = []
        while self._can_start() and (run := self._next_run(now)) is not None:
            slot, batch = run
            slot.home.remove(slot)
            self._active.append(slot)
            shape = (self._static_rows or len(batch), self._limits.padded(batch[0].length))
            slot.batch, slot.tokens = batch, shape[0] * shape[1]
            slot.inputs = self._inputs(batch, shape)
            starting.append(slot)

        jobs = sorted({waiting.job_id for slot in self._active for waiting in slot.batch} | self._failed_jobs)
        others = bool(jobs) and jobs != self._said
        if outcomes:
            emit(outcomes[0] if len(outcomes) == 1 and not others else OutcomeBatch(outcomes, others))

        if others:
            # Before they start: one of them may end the process.
            self._said = jobs
            emit(Running(jobs))

        for slot in starting:
            self._start(slot)
        self.throughput.mark_progress(now, saturated=self._saturated())

        if self._failure is not None and not self._active:
            raise DeviceBroken(self._failure)

    def _start(self, slot: Slot) -> None:
        self._meter.begin(slot)
        slot.started = time.monotonic()
        try:
            slot.request.start_async(slot.inputs)
        except RuntimeError as error:
            self._ended(slot, error)

    def _collect(self) -> list[RowResult]:
        """The results of jobs whose last row has finished."""
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)

        results: list[RowResult] = []
        while self._finished:
            slot = self._finished.popleft()
            try:
                slot.request.wait()
            except RuntimeError as error:
                self._ended(slot, error)
                continue
            batch, tokens, busy = slot.batch, slot.tokens, self._ended(slot)
            results += self._finish(batch, slot.request.get_output_tensor(0).data, time.monotonic(), tokens, busy)
        return results

    def _ended(self, slot: Slot, error: RuntimeError | None = None) -> Busy:
        """Take a slot back after its run; the busy time of that."""
        if error is not None:
            self._failure = self._failure or f"the {self._device} failed in a run: {brief(error)}"
            self._failed_jobs |= {waiting.job_id for waiting in slot.batch}

        self._active.remove(slot)
        slot.batch, slot.inputs = [], {}
        slot.home.append(slot)
        return self._meter.end(slot)

    def close(self) -> None:
        for slot in self._active:
            with contextlib.suppress(RuntimeError):
                slot.request.wait()
        self._wake.close()
        self._waker.close()
