"""Jobs of encoder engines, whatever their task: rows of token ids in, one row of numbers for each out.

Their messages, the row-level bookkeeping inside an engine (no device, no clock of its own), and the options that all
encoders share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le, Len

from worker_node.core.types import NOT_MEASURED, Busy, Device, Energy
from worker_node.engines.options import BlobOptions, EngineOptions, Option
from worker_node.engines.protocol import TOKEN_DTYPE, VECTOR_DTYPE, EngineStats, Failed, Outbox, Outcome
from worker_node.scheduling.texts import BatchLimits, TextQueue, Waiting

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
TOKEN_TYPES = "token_type_ids"  # noqa: S105  (the name of an input)
# Of sums of shares: ten tenths are a little less than one.
_ROUNDING = 1e-6


class RowJob(msgspec.Struct, frozen=True, tag="rows", array_like=True):
    """Encode `len(lengths)` rows of token ids, which stand one after another in `tokens` (int32).

    For models with token types, the tokens of row i from `second[i]` on are of type 1.
    """

    id: int
    tokens: bytes
    lengths: list[int]
    deadline: float
    interactive: bool = True
    second: list[int] = []

    @property
    def ends(self) -> float:
        return self.deadline

    def timeless(self) -> RowJob:
        return RowJob(0, self.tokens, self.lengths, 0.0, second=self.second)


def row_job(
    rows: Sequence[Sequence[int]], deadline: float, *, interactive: bool = True, second: Sequence[int] = ()
) -> RowJob:
    """The job for rows of token ids."""
    lengths = [len(row) for row in rows]
    flat = np.fromiter(itertools.chain.from_iterable(rows), TOKEN_DTYPE, count=sum(lengths))
    return RowJob(0, flat.tobytes(), lengths, deadline, interactive, list(second))


class RowResult(Outcome, frozen=True, array_like=True):
    """The result of a job; see also `serving.run.SingleResult`.

    `data` has the model's output for each row: float32, row-major. `device_tokens` are those that the device computed
    for the job, padding included. The cost of a run with rows of several jobs is divided by rows.
    """

    id: int
    data: bytes
    started: float
    inference_s: float
    busy: Busy = NOT_MEASURED
    device_tokens: int | None = None
    measured_tokens: int = 0
    measured_s: float = 0.0

    @property
    def last(self) -> bool:
        return True

    def rows(self, count: int) -> npt.NDArray[np.float32]:
        """The output as f32 [count, size]."""
        return np.frombuffer(self.data, VECTOR_DTYPE).reshape(count, -1)


@dataclass(slots=True)
class Throughput:
    """Tokens that the device computes per second, measured while more texts wait than it can run."""

    tokens: int = 0
    seconds: float = 0.0
    _saturated_since: float | None = None

    def run_ended(self, tokens: int, now: float) -> None:
        if self._saturated_since is not None:
            self.tokens += tokens
            self.seconds += now - self._saturated_since
            self._saturated_since = now

    def mark_progress(self, now: float, *, saturated: bool) -> None:
        """All runs that can start now have started; `saturated`: texts are left over."""
        if not saturated:
            self._saturated_since = None
        elif self._saturated_since is None:
            self._saturated_since = now

    def take(self) -> tuple[int, float]:
        """Return the tokens and the seconds since the last call."""
        taken = self.tokens, self.seconds
        self.tokens, self.seconds = 0, 0.0
        return taken


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
    busy_us: float | None = 0.0
    busy_shared: bool = False
    energy: Energy = Energy(0.0)  # noqa: RUF009  (frozen)


class RowRunner:
    """The base of encoder engines: all jobs that an engine holds, and the way of their rows through its runs.

    A run takes rows out of the `queue`, computes their `inputs` and finishes with its output.
    """

    jobs = RowJob
    wake_fd: int | None = None

    def __init__(self) -> None:
        self.queue = TextQueue()
        self.throughput = Throughput()
        self._running = self._runs = self._rows = 0
        self._open: dict[int, _Open] = {}
        # No deadline of an open job is before this.
        self._soonest = math.inf

    def stats(self) -> EngineStats:
        """How many texts wait and run, and how many runs there were."""
        return EngineStats(len(self.queue), self._running, self._runs, self._rows)

    def submit(self, job: RowJob) -> None:
        """Queue the texts of a job."""
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

    def expire(self, now: float, emit: Outbox) -> None:
        """Fail the jobs whose deadline passed while rows of them waited."""
        if now < self._soonest:
            return
        late = [job_id for job_id, held in self._open.items() if held.waiting and held.job.deadline <= now]
        ahead = (held.job.deadline for held in self._open.values() if held.job.deadline > now)
        self._soonest = min(ahead, default=math.inf)
        for job_id in late:
            self.cancel(job_id)
            emit(Failed(job_id, "deadline_exceeded", "the deadline passed while the request was queued"))

    def take(self, limits: BatchLimits, now: float, *, free_slots: int = 1) -> list[Waiting]:
        """Take the rows of the next run out of the queue; see `TextQueue.take`."""
        batch = self.queue.take(limits, free_slots)
        self._running += len(batch)
        for waiting in batch:
            job = self._open[waiting.job_id]
            job.waiting -= 1
            if job.started is None:
                job.started = now
        return batch

    def inputs(
        self, batch: Sequence[Waiting], shape: tuple[int, int], names: Container[str] = ()
    ) -> dict[str, npt.NDArray[np.int64]]:
        """The tensors of a run, int64 of `shape` (rows, length), by the `names` of the model's inputs.

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
        return inputs | {TOKEN_TYPES: types} if TOKEN_TYPES in names else inputs

    def finish(
        self,
        batch: Sequence[Waiting],
        output: npt.NDArray[np.float32],
        now: float,
        tokens: int,
        busy: Busy = NOT_MEASURED,
    ) -> Iterator[RowResult]:
        """Take in the output of a run (row i is that of `batch[i]`); yields the results of the completed jobs.

        The run computed `tokens`, rows times padded length, and took `busy`.
        """
        self._running -= len(batch)
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
            job.busy_us = None if job.busy_us is None or busy.us is None else job.busy_us + busy.us / len(batch)
            job.busy_shared |= busy.shared
            job.energy = job.energy.plus(busy.energy.part(len(batch)))
            touched[waiting.job_id] = job

        for job_id, job in touched.items():
            if job.missing == 0 and job.vectors is not None and job.started is not None:
                del self._open[job_id]
                # Rounded down: the jobs of a run together must not claim more than it had.
                busy_us = None if job.busy_us is None else int(job.busy_us + _ROUNDING)
                yield RowResult(
                    job_id,
                    job.vectors.tobytes(),
                    job.started,
                    now - job.started,
                    Busy(busy_us, job.busy_shared, job.energy),
                    round(job.device_tokens),
                    *self.throughput.take(),
                )


@dataclass(frozen=True, kw_only=True)
class DynamicEncoderOptions(EngineOptions):
    """Precision, streams and batches. None takes what was measured to be best.

    `context_limit` is the model's, in tokens; the node sets it. Lengths are not rounded up where it is unknown.
    """

    devices: ClassVar[frozenset[Device]] = frozenset({Device.CPU, Device.GPU})
    runner: ClassVar[str] = "worker_node.encoders.dynamic:DynamicEncoder"

    engine: str = ""

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
        int | None, Gt(0), Option("tokens of one batch, padding included", default="256 on a CPU, 8192 on a GPU")
    ] = None
    max_batch_rows: Annotated[int, Gt(0), Option("texts of one batch")] = 64
    length_multiple: Annotated[
        int | None,
        Ge(1),
        Le(256),
        Option(
            "texts are padded to multiples of this many tokens, but not beyond the model's limit; those of one padded "
            "length run together",
            default="8 on a CPU, 16 where it computes in bf16 or f16, 32 on a GPU",
        ),
    ] = None
    context_limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class StaticEncoderOptions(BlobOptions):
    """Shapes. In an engine `npu_buckets` are ascending and never empty."""

    devices: ClassVar[frozenset[Device]] = frozenset({Device.NPU})
    runner: ClassVar[str] = "worker_node.encoders.static:StaticEncoder"

    engine: str = ""

    npu_buckets: Annotated[
        tuple[Annotated[int, Ge(8)], ...],
        Len(1),
        Option(
            "lengths in tokens that the model is compiled for; a text runs in the smallest that holds it",
            default="16, 24, 32, 64, 128 … up to the model's limit",
        ),
    ] = ()
    npu_batch_size: Annotated[int, Ge(1), Le(64), Option("texts of one run")] = 1
    infer_requests: Annotated[
        int | None,
        Ge(1),
        Le(64),
        Option(
            "runs that the NPU is given at the same time, while they have at most 4096 tokens together; 1 compiles for "
            "the shortest single run",
            default="what the NPU's plugin recommends: 4 on NPU 3720, 8 on later ones",
        ),
    ] = None
