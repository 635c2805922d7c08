"""What an engine is, on either side of the process boundary.

* `Engine` is the edge process's view: asynchronous, and independent of where the work runs. It is implemented by a
  child process (`hosting.supervisor`), and in tests by a script.
* `Runner` runs inside the engine process: synchronous, single-threaded, the only owner of a pipeline.

The messages between them are in `messages`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from worker_node.engines.messages import EngineStats, Event, Job, JobResult, Loaded, Outcome

R = TypeVar("R", bound=JobResult)
R_co = TypeVar("R_co", bound=JobResult, covariant=True)


class DeviceBroken(Exception):
    """Raised by a runner when its device or driver failed in the middle of a job."""


class Outbox(Protocol):
    """Sends a runner's events."""

    def __call__(self, event: Event | Outcome) -> None: ...


class Inbox(Protocol):
    """Passes every command that has arrived to the runner, without waiting for more."""

    def __call__(self) -> None: ...


class Runner(Protocol):
    """A pipeline and the queue before it, inside an engine process.

    The loop calls `submit` and `cancel` as commands arrive and `step` while `has_work`; nothing is called from two
    threads. Before a native call that blocks the loop a runner emits a `NativeCall`. One that works in native threads
    meanwhile makes `wake_fd` readable when something has finished, and reports its oldest run in `stats`. `jobs` is the
    type of its jobs.
    """

    @property
    def jobs(self) -> Any: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def wake_fd(self) -> int | None: ...
    def load(self) -> Loaded: ...
    def submit(self, job: Any) -> None: ...
    def cancel(self, job_id: int) -> None: ...
    def step(self, emit: Outbox, poll: Inbox) -> None: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class EngineState(StrEnum):
    """The states of an engine."""

    UNLOADED = "unloaded"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    QUARANTINED = "quarantined"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class CanaryProof:
    """What the last passed canary proved: this model on this device, with this driver and this OpenVINO.

    `passed_at` is `time.time()`, for people.
    """

    passed_at: float
    device_name: str
    driver: str | None
    runtime: str


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A reading of an engine; `reason` is set whenever the state is not `ready`.

    `restarts` counts the processes that ended by a failure, `wrong` those of them that the canary ended. `recycles`
    counts by its form how often a process was replaced because its memory had grown; `replacing`: the engine is being
    started for that reason, and requests wait for it. `served`: it has been ready before. `shapes` counts
    the static shapes that its processes loaded, by their origin: `compiled` or `imported`.
    """

    state: EngineState
    reason: str | None = None
    pid: int | None = None
    restarts: int = 0
    wrong: int = 0
    load_seconds: float | None = None
    device_name: str | None = None
    retry_after: float | None = None
    in_flight: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    proof: CanaryProof | None = None
    replacing: bool = False
    served: bool = False
    recycles: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, int] = field(default_factory=dict)


class ResultStream(Protocol[R_co]):
    """The results of one job, as they come; closing it cancels the job. An asynchronous generator is one."""

    def __aiter__(self) -> AsyncIterator[R_co]: ...
    def __anext__(self) -> Awaitable[R_co]: ...
    def aclose(self) -> Awaitable[None]: ...


class Engine(Protocol):
    """An engine as the edge process sees it."""

    @property
    def status(self) -> EngineStatus: ...

    @property
    def ready(self) -> bool:
        """Whether its state is `ready`. Every request asks, and a whole status costs many times as much."""
        ...

    def wake(self) -> None:
        """Start to load an engine that is unloaded; does nothing for any other."""
        ...

    async def unload(self) -> bool:
        """Free its memory until `wake`; False, and nothing done, while it holds jobs or is being loaded."""
        ...

    async def stop(self, reason: str = ...) -> None:
        """End the engine for good; its requests end with the `reason`, by default that the node is shutting down."""
        ...

    async def settled(self) -> EngineStatus:
        """Wait until the engine is ready, or known not to become ready by itself soon."""
        ...

    def next_change(self) -> Coroutine[None, None, object]:
        """Return what to await for the first change of state after this call."""
        ...

    def run(self, job: Job, result: type[R]) -> ResultStream[R]:
        """Return the job's results as they come; closing them cancels the job.

        The job's `id` is set by the engine, which gets the job when the first result is asked for. Raises
        EngineUnavailable, DeadlineExceeded, Overloaded.
        """
        ...
