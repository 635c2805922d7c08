"""Row-level bookkeeping of an engine's jobs: what waits, runs and is done. No device, no clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le, Len

from worker_node.core.types import Device
from worker_node.engines.options import BlobOptions, EngineOptions, Option
from worker_node.engines.protocol import TOKEN_DTYPE, VECTOR_DTYPE, EngineStats, Outcome
from worker_node.scheduling.prompts import Deadlines
from worker_node.scheduling.texts import BatchLimits, PackingLimits, TextQueue, Waiting


class RowJob(Protocol):
    """A job of `len(lengths)` texts, whose token ids stand one after another in `tokens` (int32)."""

    @property
    def id(self) -> int: ...
    @property
    def tokens(self) -> bytes: ...
    @property
    def lengths(self) -> list[int]: ...
    @property
    def deadline(self) -> float: ...
    @property
    def interactive(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RunCost:
    """What one run on the device cost. `tokens` is rows times padded length."""

    tokens: int
    busy_us: int | None = None
    busy_shared: bool = False


@dataclass(slots=True)
class Throughput:
    """Tokens that the device computes per second, over the times in which more texts waited than it could run."""

    tokens: int = 0
    seconds: float = 0.0
    _pressed_at: float | None = None

    def finished(self, tokens: int, now: float) -> None:
        """A run ended."""
        if self._pressed_at is not None:
            self.tokens += tokens
            self.seconds += now - self._pressed_at
            self._pressed_at = now

    def went_on(self, now: float, *, waiting: bool) -> None:
        """The device has all the runs that it is going to get now; `waiting` says whether texts are left over."""
        if not waiting:
            self._pressed_at = None
        elif self._pressed_at is None:
            self._pressed_at = now

    def take(self) -> tuple[int, float]:
        """Return the tokens and the seconds since the last call."""
        taken = self.tokens, self.seconds
        self.tokens, self.seconds = 0, 0.0
        return taken


@dataclass(slots=True)
class _Open:
    """A job of which rows are still missing."""

    job: RowJob
    rows: list[npt.NDArray[np.int32]]
    missing: int
    waiting: int
    vectors: npt.NDArray[np.float32] | None = None
    started: float | None = None
    device_tokens: float = 0.0
    busy_us: float | None = 0.0
    busy_shared: bool = False


@dataclass(slots=True)
class RowJobs:
    """All jobs that an engine holds; `queue` has their waiting rows. Every operation is O(log n) a row.

    `result` makes what a finished job gets: its id, its vectors (float32, row-major), start, seconds, busy time,
    whether others used the NPU, device tokens, measured tokens and seconds.
    """

    result: Callable[..., Outcome]
    queue: TextQueue = field(default_factory=TextQueue)
    throughput: Throughput = field(default_factory=Throughput)
    runs: int = 0
    rows: int = 0
    _running: int = 0
    _open: dict[int, _Open] = field(default_factory=dict)
    _deadlines: Deadlines = field(default_factory=Deadlines)

    def __len__(self) -> int:
        return len(self._open)

    def stats(self) -> EngineStats:
        """How many texts wait and run, and how many runs there were."""
        return EngineStats(len(self.queue), self._running, self.runs, self.rows)

    def add(self, job: RowJob) -> None:
        """Queue the texts of a job."""
        tokens = np.frombuffer(job.tokens, TOKEN_DTYPE)
        rows = np.split(tokens, np.cumsum(job.lengths)[:-1])
        self._open[job.id] = _Open(job, rows, missing=len(rows), waiting=len(rows))
        self._deadlines.add(job.id, job.deadline)
        for row, length in enumerate(job.lengths):
            self.queue.add(Waiting(job.id, row, length, job.interactive))

    def cancel(self, job_id: int) -> None:
        """Cancel a job: its waiting rows are dropped, the vectors of its running rows ignored."""
        job = self._open.pop(job_id, None)
        if job is None:
            return
        if job.waiting:
            for row in range(len(job.rows)):
                self.queue.remove(job_id, row)
        self._deadlines.compact(self._open, len(self._open))

    def expire(self, now: float) -> list[int]:
        """Cancel the jobs whose deadline passed while rows of them waited; return their ids."""
        late = [job_id for job_id in self._deadlines.due(now, self._open) if self._open[job_id].waiting]
        for job_id in late:
            self.cancel(job_id)
        return late

    def take(self, limits: BatchLimits | PackingLimits, now: float, *, free_slots: int = 1) -> list[Waiting]:
        """Take the rows of the next run out of the queue, shortest first; see `TextQueue.take`."""
        batch = self.queue.take(limits, free_slots)
        if not batch:
            return batch
        self.runs += 1
        self.rows += len(batch)
        self._running += len(batch)
        for waiting in batch:
            job = self._open[waiting.job_id]
            job.waiting -= 1
            if job.started is None:
                job.started = now
        return batch

    def job(self, job_id: int) -> RowJob:
        """A job that is not finished."""
        return self._open[job_id].job

    def padded(
        self, batch: Sequence[Waiting], shape: tuple[int, int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return input ids and attention mask, int64 of `shape` (rows, length), with the batch in the first rows.

        Unused rows attend to one token, since a mean over none is no number.
        """
        ids = np.zeros(shape, np.int64)
        mask = np.zeros(shape, np.int64)
        for i, waiting in enumerate(batch):
            ids[i, : waiting.length] = self._open[waiting.job_id].rows[waiting.row]
            mask[i, : waiting.length] = 1
        mask[len(batch) :, 0] = 1
        return ids, mask

    def packed(
        self, batch: Sequence[Waiting], length: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the ids, positions and segments of one row, int64 (1, length), with the texts of the batch in it.

        The tokens of `batch[i]` are of segment i + 1, padding is of segment 0.
        """
        ids, positions, segments = (np.zeros((1, length), np.int64) for _ in range(3))
        start = 0
        for number, waiting in enumerate(batch, 1):
            place = np.s_[0, start : start + waiting.length]
            ids[place] = self._open[waiting.job_id].rows[waiting.row]
            positions[place] = np.arange(waiting.length)
            segments[place] = number
            start += waiting.length
        return ids, positions, segments

    def finish(
        self, batch: Sequence[Waiting], output: npt.NDArray[np.float32], cost: RunCost, now: float
    ) -> Iterable[Outcome]:
        """Take in a run's vectors (row i is that of `batch[i]`) and return the jobs that are complete by it."""
        self._running -= len(batch)
        self.throughput.finished(cost.tokens, now)
        touched: dict[int, _Open] = {}
        for i, waiting in enumerate(batch):
            job = self._open.get(waiting.job_id)
            if job is None:
                continue
            if job.vectors is None:
                job.vectors = np.empty((len(job.rows), output.shape[1]), VECTOR_DTYPE)
            job.vectors[waiting.row] = output[i]
            job.missing -= 1
            job.device_tokens += cost.tokens / len(batch)
            job.busy_us = (
                None if job.busy_us is None or cost.busy_us is None else job.busy_us + cost.busy_us / len(batch)
            )
            job.busy_shared |= cost.busy_shared
            touched[waiting.job_id] = job
        for job_id, job in touched.items():
            if job.missing == 0 and job.vectors is not None and job.started is not None:
                del self._open[job_id]
                self._deadlines.compact(self._open, len(self._open))
                yield self.result(
                    job_id,
                    job.vectors.tobytes(),
                    job.started,
                    now - job.started,
                    None if job.busy_us is None else round(job.busy_us),
                    job.busy_shared,
                    round(job.device_tokens),
                    *self.throughput.take(),
                )


# Options that the engines of all encoders have; a task declares its own classes with them.


@dataclass(frozen=True, kw_only=True)
class DynamicEncoderOptions(EngineOptions):
    """Precision, streams and batches. None takes what was measured to be best.

    `context_limit` is the model's, in tokens; the node sets it. Lengths are not rounded up where it is unknown.
    """

    devices: ClassVar[frozenset[Device]] = frozenset({Device.CPU, Device.GPU})

    precision: Annotated[
        str | None, Option("OpenVINO's inference precision, for example f32 or bf16", default="the device's own")
    ] = None
    streams: Annotated[
        int | None,
        Ge(0),
        Le(64),
        Option(
            "batches that run at the same time; 0 leaves it to the device",
            default="one for each core of a CPU with at most 4, else what the device takes",
            also=("nireq",),
        ),
    ] = None
    max_batch_tokens: Annotated[
        int | None, Gt(0), Option("tokens of one batch, padding included", default="512 on a CPU, 8192 on a GPU")
    ] = None
    max_batch_rows: Annotated[int, Gt(0), Option("texts of one batch")] = 64
    length_multiple: Annotated[
        int | None,
        Ge(1),
        Le(256),
        Option(
            "batches are padded to lengths that are multiples of this, in tokens, but not beyond the model's limit",
            default="16 on a CPU that computes in bf16 or f16, else 1",
        ),
    ] = None
    context_limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class StaticEncoderOptions(BlobOptions):
    """Shapes. In an engine `npu_buckets` are ascending and never empty.

    `busy_counter` is the file of the NPU's busy counter, which the engine advances itself if `stand_in`.
    """

    devices: ClassVar[frozenset[Device]] = frozenset({Device.NPU})

    npu_buckets: Annotated[
        tuple[Annotated[int, Ge(8)], ...],
        Len(1),
        Option(
            "lengths in tokens that the model is compiled for; a text runs in the smallest that holds it",
            default="16, 24, 32, 64, 128 … up to the model's limit",
        ),
    ] = ()
    npu_batch_size: Annotated[int, Ge(1), Le(64), Option("texts of one run")] = 1
    busy_counter: str | None = None
    stand_in: bool = False
