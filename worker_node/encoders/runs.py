"""Runs of encoder engines: infer requests that the device works on at the same time, beside the engine's loop."""

from __future__ import annotations

import contextlib
import socket
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import openvino as ov

from worker_node.core.types import Busy
from worker_node.devices.blobs import brief
from worker_node.devices.npu import OverlappingRuns, busy_meter
from worker_node.encoders.jobs import RowResult, RowRunner
from worker_node.engines.protocol import DeviceBroken, EngineSpec, EngineStats, Inbox, Outbox, OutcomeBatch, Running
from worker_node.scheduling.texts import BatchLimits, Waiting


@dataclass(slots=True, eq=False)
class Slot:
    """An infer request and what it is running. While it is idle it is in the list `home`."""

    request: ov.InferRequest
    home: list[Slot]
    batch: list[Waiting] = field(default_factory=list)
    inputs: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    tokens: int = 0
    started: float = 0.0


class OverlappingRunner(RowRunner):
    """The base of encoder engines whose runs overlap: starts them, takes in what has finished, and says what runs.

    When a run fails, no other is started. Those that are active still give their answers; then the engine ends, and
    only the jobs of failed runs are suspects.
    """

    def __init__(self, spec: EngineSpec, *, limits: BatchLimits, rows: int | None = None) -> None:
        """A run has `rows` rows; None is as many as it has texts."""
        super().__init__()
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
        """An idle slot and the texts that it is to run, taken out of the queue; there is room for it.

        None where the device has no memory for another run; then there is no room any more.
        """

    def _saturated(self) -> bool:
        """Whether the device has as much as it can take, so that its speed can be measured."""
        return len(self.queue) > 0

    def _can_start(self) -> bool:
        return self._failure is None and len(self.queue) > 0 and self._has_room()

    @property
    def has_work(self) -> bool:
        return bool(self._finished) or self._can_start()

    def stats(self) -> EngineStats:
        oldest = min(self._active, key=lambda slot: slot.started, default=None)
        return msgspec.structs.replace(
            super().stats(),
            oldest_run=None if oldest is None else (oldest.tokens, time.monotonic() - oldest.started),
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
        self.expire(now, emit)
        starting = []
        while self._can_start() and (run := self._next_run(now)) is not None:
            starting.append(self._fill(*run))

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

    def _fill(self, slot: Slot, batch: list[Waiting]) -> Slot:
        slot.home.remove(slot)
        self._active.append(slot)

        shape = (self._static_rows or len(batch), self._limits.padded(batch[0].length))
        slot.batch, slot.tokens = batch, shape[0] * shape[1]
        slot.inputs = self.inputs(batch, shape, self._names)
        return slot

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
            results += self.finish(batch, slot.request.get_output_tensor(0).data, time.monotonic(), tokens, busy)
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
