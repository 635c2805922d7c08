"""The messages between the edge process and an engine process.

Jobs and commands go in, events come out (`wire` frames them). Only the task knows the types of its jobs and
results (`tasks`): here they travel encoded, identified by the job's id. Times are `time.monotonic()` seconds, one clock
for both processes.

A `Runner` runs inside the engine process: synchronous, single-threaded, the only owner of a pipeline."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, cast

import msgspec

from worker_node.core.types import Device
from worker_node.devices.energy import EnergyMeter, energy_counter
from worker_node.scheduling.prompts import J, JobQueue

# Token ids and vectors travel as raw arrays, little-endian, never as lists of numbers: NumPy's names of these types,
# since importing NumPy takes longer than starting all else of an engine that does without.
TOKEN_DTYPE = "<i4"  # noqa: S105  (no password)
TOKEN_BYTES = 4
VECTOR_DTYPE = "<f4"

_encoder = msgspec.msgpack.Encoder()


class EngineSpec(msgspec.Struct, frozen=True):
    """What an engine process must know to load its model.

    `kind` is the task that the model is for, `runner` the class that runs it, as "module:class"; `options` are that
    runner's own. `loads` names files beside the model's own that it loads, for the error message if they kill it.
    `nice` is added to the edge's own nice value. `energy_sysfs` is read in place of /sys/class for the energy.
    """

    model_id: str
    kind: str
    path: str
    device: Device
    runner: str
    options: dict[str, object]
    emulated: bool = False
    loads: str | None = None
    nice: int = 0
    energy_sysfs: str | None = None

    def energy_meter(self) -> EnergyMeter:
        sysfs = None if self.energy_sysfs is None else Path(self.energy_sysfs)
        return EnergyMeter(energy_counter(self.device, emulated=self.emulated, sysfs=sysfs))


class Job(Protocol):
    """What an engine is to do: a frozen `msgspec.Struct` of a task's own."""

    @property
    def id(self) -> int: ...
    @property
    def deadline(self) -> float: ...
    @property
    def ends(self) -> float:
        """When its results must have ended once they have begun; the deadline, but for a stream."""
        ...

    @property
    def interactive(self) -> bool: ...

    def timeless(self) -> Self:
        """Return the job without its id and the time and room that it has: equal for a request that is sent again."""
        ...


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """A job for the engine. `body` is the task's job, encoded."""

    id: int
    body: msgspec.Raw


class Result(msgspec.Struct, frozen=True, array_like=True):
    """One result of job `id`. `body` is the task's result, encoded; nothing follows the `last` one."""

    id: int
    body: msgspec.Raw
    last: bool


class Results(msgspec.Struct, frozen=True, tag="results", array_like=True):
    """The results of one engine step, for any of its jobs."""

    results: list[Result]


class JobResult(Protocol):
    """A result of a job: a frozen `msgspec.Struct` of a task's own. Nothing follows the `last` one of a job."""

    @property
    def id(self) -> int: ...
    @property
    def last(self) -> bool: ...


class Outcome(msgspec.Struct, frozen=True):
    """What a runner emits for its jobs: the base of a task's own."""

    @property
    def followed(self) -> bool:
        """Whether the runner emits again before its next native call: both travel together and wake the edge once."""
        return False

    def parts(self) -> Sequence[JobResult]:
        """Return the results in the order of delivery; by default the outcome is the one result of its job."""
        return (cast("JobResult", self),)


class OutcomeBatch(Outcome, frozen=True):
    """Outcomes of one step in one frame: the edge is woken once. `more`: the runner emits again at once."""

    outcomes: Sequence[Outcome]
    more: bool = False

    @property
    def followed(self) -> bool:
        return self.more

    def parts(self) -> Sequence[JobResult]:
        return [part for outcome in self.outcomes for part in outcome.parts()]


def results_of(outcome: Outcome) -> Results:
    return Results([Result(part.id, msgspec.Raw(_encoder.encode(part)), part.last) for part in outcome.parts()])


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """Finish nothing, free the device and exit."""


Command = Submit | Cancel | Shutdown


class Loaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    """The pipeline is up. `seconds` is the time that loading and compiling took; `driver` the device's, where it
    has one. `openvino` is the version that the process has imported.

    Of an engine that may load blobs: how many static shapes it `compiled` (or found in its compile cache), and how many
    it `imported` from blobs.
    """

    seconds: float
    device_name: str
    runtime: str
    driver: str | None = None
    compiled: int = 0
    imported: int = 0
    openvino: str | None = None


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed", array_like=True):
    """The pipeline cannot be built; an immediate restart with the same files and device will not help."""

    message: str


class Broken(msgspec.Struct, frozen=True, tag="broken", array_like=True):
    """The device failed and no further job can be trusted to it: this process ends and must be replaced."""

    message: str


class NativeCall(msgspec.Struct, frozen=True, tag="native_call", array_like=True):
    """The engine enters a native call for `jobs` and is silent until it returns: its next event says that it has.

    `stage` is what is called: prepare (nothing of the job has run on the device), begin (the pipeline takes it),
    prefill, step, run. `units` is the call's size in tokens, or in characters of a grammar. `jobs` are all that the
    call works on, also those that were cancelled and cannot be taken out of it. The engine's loop marks the `first`
    call of a stage, which may compile.
    """

    stage: str
    units: int
    jobs: list[int]
    first: bool = False


class Running(msgspec.Struct, frozen=True, tag="running", array_like=True):
    """The device works on `jobs`, as in `NativeCall`, and on no others, while the engine's loop turns."""

    jobs: list[int]


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """One job failed; the engine lives on. `code` is that of an error in `worker_node.core.errors`."""

    id: int
    code: str
    message: str


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """How busy an engine is. `waiting` and `running` count jobs, or texts for embeddings.

    `runs` and `rows` are cumulative: their quotient is the mean batch. `kv_cache_usage` is a share of 1, None where
    there is no paged cache. `oldest_run` is the oldest run that the device works on while the engine's loop turns:
    tokens, padding included, and seconds. Of `prefix_asked_tokens` of prompts, `prefix_hit_tokens` began as an earlier
    prompt did; both are cumulative, and 0 without a prefix cache.
    """

    waiting: int = 0
    running: int = 0
    runs: int = 0
    rows: int = 0
    kv_cache_usage: float | None = None
    oldest_run: tuple[int, float] | None = None
    prefix_asked_tokens: int = 0
    prefix_hit_tokens: int = 0


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", array_like=True):
    """The engine's loop turns. `idle`: it works on nothing, neither for those who wait nor for those who have left."""

    stats: EngineStats
    idle: bool = False


Event = Loaded | LoadFailed | Broken | NativeCall | Running | Results | Failed | Heartbeat


R = TypeVar("R", bound=JobResult)
R_co = TypeVar("R_co", bound=JobResult, covariant=True)


class DeviceBroken(Exception):
    """Raised by a runner when its device or driver failed in the middle of a job."""


# Sends a runner's events.
Outbox = Callable[[Event | Outcome], None]
# Passes every command that has arrived to the runner, without waiting for more.
Inbox = Callable[[], None]


class Runner(Protocol):
    """A pipeline and the queue before it, inside an engine process.

    The loop calls `submit` and `cancel` as commands arrive and `step` while `has_work`; nothing is called from two
    threads. Before a native call that blocks the loop a runner emits a `NativeCall`. One that works in native threads
    meanwhile makes `wake_fd` readable when something has finished, reports its oldest run in `stats`, and emits
    `Running` when other jobs run than before. `jobs` is the type of its jobs.
    """

    jobs: Any
    has_work: bool
    wake_fd: int | None

    def load(self) -> Loaded: ...
    def submit(self, job: Any) -> None: ...
    def cancel(self, job_id: int) -> None: ...
    def step(self, emit: Outbox, poll: Inbox) -> None: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class SerialRunner(ABC, Generic[J]):
    """A `Runner` that runs one job at a time, in one native call that releases the GIL; commands are taken in between.

    A derived class loads `_pipeline`. While it runs `_current`, `_cancelled` says that its caller has left;
    `_generated` are the tokens that it has generated so far.
    """

    _pipeline: Any
    wake_fd: int | None = None

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


class EngineState(StrEnum):
    """The states of an engine.

    `loadable`: a load has not begun or has not ended. `down`: it does not serve, and no request changes that.
    `given_up`: no process of it will start soon, so others may use its memory.
    """

    UNLOADED = "unloaded"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    QUARANTINED = "quarantined"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def loadable(self) -> bool:
        return self in {EngineState.UNLOADED, EngineState.STARTING}

    @property
    def down(self) -> bool:
        return self not in {EngineState.UNLOADED, EngineState.STARTING, EngineState.READY}

    @property
    def given_up(self) -> bool:
        return self in {EngineState.QUARANTINED, EngineState.FAILED}


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A reading of an engine; `reason` is set whenever the state is not `ready`.

    `restarts` counts the processes that ended by a failure, `wrong` those of them that the canary ended. `recycles`
    counts by its form (`idle`, `forced`) how often a process was replaced because its memory had grown; `replacing`:
    the engine is being started for that reason, and requests wait for it. `loaded` is what the last process that was
    ready reported, None before; `proven_at` (`time.time()`) when a canary last passed, None after one that failed.
    `stale`: what the node knows of the model does not hold any more, and the engine does not load. `shapes` counts the
    static shapes that its processes loaded, by their origin: `compiled` or `imported`. `prewarm` says how far the
    present process is with what the settings name for its prefix cache; None where they name nothing.
    """

    state: EngineState
    reason: str | None = None
    pid: int | None = None
    restarts: int = 0
    wrong: int = 0
    loaded: Loaded | None = None
    proven_at: float | None = None
    retry_after: float | None = None
    in_flight: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    replacing: bool = False
    stale: bool = False
    recycles: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, int] = field(default_factory=dict)
    prewarm: Literal["running", "done", "failed"] | None = None

    @property
    def returns(self) -> bool:
        """Whether the engine served and is started again after a pause."""
        return self.loaded is not None and self.state is EngineState.BACKING_OFF


class ResultStream(Protocol[R_co]):
    """The results of one job, as they come; closing it cancels the job. An asynchronous generator is one."""

    def __aiter__(self) -> AsyncIterator[R_co]: ...
    def __anext__(self) -> Awaitable[R_co]: ...
    def aclose(self) -> Awaitable[None]: ...


class JobEngine(Protocol):
    """What runs jobs: an engine, or one process of it that its canary examines."""

    def run(self, job: Job, result: type[R]) -> ResultStream[R]:
        """The job's results; closing them cancels it. They raise EngineUnavailable, DeadlineExceeded, Overloaded."""
        ...
