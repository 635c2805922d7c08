"""What engines and the rest of the node say to each other.

Two sides of one process boundary:

* `Engine` is what the edge process holds: asynchronous, and blind to where the work runs. It is implemented by
  a child process (`hosting.supervisor`), and may be by a cluster actor or by a script in tests.
* `Runner` is what lives inside the engine process: synchronous, single-threaded, the only owner of a pipeline.

Jobs and events are the messages between them. Token ids and vectors travel as raw little-endian arrays, never as
lists of numbers. `deadline` and `started` are `time.monotonic()` seconds, one clock for both processes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from worker_node.domain import Device, ModelKind

TOKEN_DTYPE = np.dtype("<i4")
VECTOR_DTYPE = np.dtype("<f4")


class EngineSpec(msgspec.Struct, frozen=True):
    """All that an engine process must know to load its model. `options` are the runner's own (see each runner)."""

    model_id: str
    kind: ModelKind
    path: str
    device: Device
    runner: str
    options: dict[str, object]
    emulated: bool = False


class EmbedJob(msgspec.Struct, frozen=True, tag="embed", array_like=True):
    """Embed `len(lengths)` texts, whose token ids stand one after another in `tokens` (int32)."""

    id: int
    tokens: bytes
    lengths: list[int]
    deadline: float
    interactive: bool = True


class GenerateJob(msgspec.Struct, frozen=True, tag="generate", array_like=True):
    """Continue the prompt whose token ids are `tokens` (int32). `temperature` 0 means greedy.

    `grammar` is EBNF that the runtime is known to read: one that it cannot read would break the pipeline for good.
    """

    id: int
    tokens: bytes
    max_new_tokens: int
    deadline: float
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    interactive: bool = True
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: bool = False
    grammar: str | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """Nobody waits for job `id` any more."""

    id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """Finish nothing, free the device and exit."""


Job = EmbedJob | GenerateJob
Command = EmbedJob | GenerateJob | Cancel | Shutdown


class Loaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    """The pipeline is up. `seconds` is the time that loading and compiling took; `driver` the device's, where it
    has one."""

    seconds: float
    device_name: str
    runtime: str
    driver: str | None = None


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed", array_like=True):
    """The pipeline cannot be built; trying again with the same files and device will not help."""

    message: str


class Broken(msgspec.Struct, frozen=True, tag="broken", array_like=True):
    """The device failed and no further job can be trusted to it: this process ends and must be replaced."""

    message: str


class DeviceBroken(Exception):
    """Raised by a runner when its device or driver failed in the middle of a job."""


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """New token ids of one generation. `finish` is set on the last: stop, length; `logprobs`, where asked for, are
    natural logarithms, one a token.

    `started` (monotonic) is set on the first delta: when the engine took the job up. `busy_us` is the NPU's busy time
    since then, `busy_shared` that others are known to have used it too.
    """

    id: int
    tokens: list[int]
    finish: str | None = None
    started: float | None = None
    busy_us: int | None = None
    logprobs: list[float] | None = None
    busy_shared: bool = False


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """What one engine step brought forth, for all running generations at once."""

    deltas: list[TokenDelta]


class Embedded(msgspec.Struct, frozen=True, tag="embedded", array_like=True):
    """The finished vectors of one job: float32, row-major, `len(lengths)` rows.

    `device_tokens` are those that the device computed for it, padding included. For `busy_us` and `busy_shared` see
    `TokenDelta`; a run that held texts of several jobs is shared out by rows.
    """

    id: int
    vectors: bytes
    started: float
    inference_s: float
    busy_us: int | None = None
    busy_shared: bool = False
    device_tokens: int | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """One job failed; the engine lives on. `code` is that of an error in `worker_node.errors`."""

    id: int
    code: str
    message: str


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """How busy an engine is. `waiting` and `running` count jobs, or texts for embeddings.

    `runs` and `rows` are cumulative: their quotient is the mean batch. `kv_cache_usage` is a share of 1, None where
    there is no paged cache.
    """

    waiting: int = 0
    running: int = 0
    runs: int = 0
    rows: int = 0
    kv_cache_usage: float | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", array_like=True):
    """The engine's loop turns."""

    stats: EngineStats


Event = Loaded | LoadFailed | Broken | Step | Embedded | Failed | Heartbeat


class Outbox(Protocol):
    """Where a runner puts its events."""

    def __call__(self, event: Event) -> None: ...


class Inbox(Protocol):
    """Hands every command that has arrived to the runner, without waiting for more."""

    def __call__(self) -> None: ...


class Runner(Protocol):
    """A pipeline and the queue before it, inside an engine process.

    The loop calls `submit` and `cancel` as commands arrive and `step` while `has_work`; nothing is called from two
    threads. A runner that works in native threads meanwhile makes `wake_fd` readable when something has finished.
    """

    @property
    def has_work(self) -> bool: ...
    @property
    def wake_fd(self) -> int | None: ...
    def load(self) -> Loaded: ...
    def submit(self, job: Job) -> None: ...
    def cancel(self, job_id: int) -> None: ...
    def step(self, emit: Outbox, poll: Inbox) -> None: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class EngineState(StrEnum):
    """Where an engine is in its life."""

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
    """A reading of an engine; `reason` is set whenever the state is not `ready`."""

    state: EngineState
    reason: str | None = None
    pid: int | None = None
    restarts: int = 0
    load_seconds: float | None = None
    device_name: str | None = None
    retry_after: float | None = None
    in_flight: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    proof: CanaryProof | None = None


class Engine(Protocol):
    """An engine as the edge process sees it."""

    @property
    def status(self) -> EngineStatus: ...

    def wake(self) -> None:
        """Begin to load an engine that is unloaded; nothing for any other."""
        ...

    async def unload(self) -> bool:
        """Free its memory until `wake`; False, and nothing done, while it holds jobs or is not ready."""
        ...

    async def stop(self) -> None:
        """End the engine for good."""
        ...

    async def settled(self) -> EngineStatus:
        """Wait until the engine is ready, or known not to become so by itself soon."""
        ...

    async def embed(self, tokens: list[list[int]], *, deadline: float, interactive: bool = True) -> EmbeddingOutput:
        """Return the vectors of the texts, in order. Raises EngineUnavailable, DeadlineExceeded."""
        ...

    def generate(self, job: GenerateJob) -> AsyncGenerator[TokenDelta, None]:
        """Yield token ids as they come, the last with `finish`. Closing the iterator cancels the generation.

        The job's `id` is set by the engine. Raises EngineUnavailable, DeadlineExceeded, Overloaded.
        """
        ...


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """`vectors`: float32 (n, dimensions). `started` is monotonic time, `inference_s` seconds on the device.

    `device_tokens` are those that the device computed, padding included, where the engine counts them.
    """

    vectors: npt.NDArray[np.float32]
    started: float
    inference_s: float
    busy_us: int | None
    busy_shared: bool = False
    device_tokens: int | None = None
