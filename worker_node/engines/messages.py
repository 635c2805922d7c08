"""The messages between the edge process and an engine process.

Jobs and commands go in, events come out (`hosting.wire` frames them). Token ids and vectors travel as raw arrays,
little-endian, never as lists of numbers. `deadline` and `started` are `time.monotonic()` seconds, one clock for both
processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

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


def embed_job(job_id: int, rows: Sequence[Sequence[int]], deadline: float, *, interactive: bool = True) -> EmbedJob:
    """The job for texts that are rows of token ids."""
    lengths = [len(row) for row in rows]
    flat = np.fromiter(itertools.chain.from_iterable(rows), TOKEN_DTYPE, count=sum(lengths))
    return EmbedJob(job_id, flat.tobytes(), lengths, deadline, interactive)


class GenerateJob(msgspec.Struct, frozen=True, tag="generate", array_like=True):
    """Continue the prompt whose token ids are `tokens` (int32). `temperature` 0 means greedy.

    Within `min_new_tokens` neither the model's end nor one of `stop_token_ids` is generated; the ids must be of the
    model's vocabulary. `grammar` is EBNF that the runtime is known to read: one that it cannot read would break the
    pipeline for good.
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
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.tokens) // TOKEN_DTYPE.itemsize


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
    """The pipeline cannot be built; an immediate restart with the same files and device will not help."""

    message: str


class Broken(msgspec.Struct, frozen=True, tag="broken", array_like=True):
    """The device failed and no further job can be trusted to it: this process ends and must be replaced."""

    message: str


class NativeCall(msgspec.Struct, frozen=True, tag="native_call", array_like=True):
    """The engine enters a native call for `jobs` and is silent until it returns: its next event says that it has.

    `stage` is what is called: prepare (nothing of the job has run on the device), prefill, step, run. `units` is the
    call's size in tokens, or in characters of a grammar.
    """

    stage: str
    units: int
    jobs: list[int]


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """New token ids of one generation. `finish` is set on the last: stop, length; `logprobs`, where asked for, are
    natural logarithms, one a token.

    `started` (monotonic) is set on the first delta: when the engine took the job up. `busy_us` is the NPU's busy time
    since then, `busy_shared` that others are known to have used it too. `at` (monotonic) is when the engine had the
    tokens. Since the last delta of any job the engine computed `prefilled` prompt tokens in `prefill_s` seconds.
    """

    id: int
    tokens: list[int]
    finish: str | None = None
    started: float | None = None
    busy_us: int | None = None
    logprobs: list[float] | None = None
    busy_shared: bool = False
    at: float | None = None
    prefilled: int = 0
    prefill_s: float = 0.0


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """What one engine step brought forth, for all running generations at once."""

    deltas: list[TokenDelta]


class Embedded(msgspec.Struct, frozen=True, tag="embedded", array_like=True):
    """The finished vectors of one job: float32, row-major, `len(lengths)` rows.

    `device_tokens` are those that the device computed for it, padding included. For `busy_us` and `busy_shared` see
    `TokenDelta`; a run that held texts of several jobs is shared out by rows. Since the last such event the engine
    computed `measured_tokens` tokens of any jobs in `measured_s` seconds in which more texts were waiting.
    """

    id: int
    vectors: bytes
    started: float
    inference_s: float
    busy_us: int | None = None
    busy_shared: bool = False
    device_tokens: int | None = None
    measured_tokens: int = 0
    measured_s: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """One job failed; the engine lives on. `code` is that of an error in `worker_node.errors`."""

    id: int
    code: str
    message: str


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """How busy an engine is. `waiting` and `running` count jobs, or texts for embeddings.

    `runs` and `rows` are cumulative: their quotient is the mean batch. `kv_cache_usage` is a share of 1, None where
    there is no paged cache. `oldest_run` is the oldest run that the device works on while the engine's loop turns, and
    `last_run` the one that ended last: tokens, padding included, and seconds.
    """

    waiting: int = 0
    running: int = 0
    runs: int = 0
    rows: int = 0
    kv_cache_usage: float | None = None
    oldest_run: tuple[int, float] | None = None
    last_run: tuple[int, float] | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", array_like=True):
    """The engine's loop turns."""

    stats: EngineStats


Event = Loaded | LoadFailed | Broken | NativeCall | Step | Embedded | Failed | Heartbeat
