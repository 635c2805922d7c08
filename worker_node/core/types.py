"""Plain frozen data that the parts of the node exchange: no I/O, no HTTP.

Times are seconds of `time.monotonic()`, which on Linux is one clock for all processes of a machine, so an absolute
deadline may travel to an engine process. Durations in replies are milliseconds; busy times microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec


class Device(StrEnum):
    NPU = "NPU"
    GPU = "GPU"
    CPU = "CPU"


class ModelKind(StrEnum):
    """Kinds of model that the node itself must tell apart. A kind is any string: tasks bring theirs (`registry`)."""

    EMBEDDING = "embedding"
    GENERATION = "generation"


RouteReason = Literal[
    "preferred",
    "context_exceeds_npu",
    "context_exceeds_gpu",
    "context_exceeds_cpu",
    "unsupported_on_npu",
    "unsupported_on_gpu",
    "unsupported_on_cpu",
    "device_unavailable",
    "device_quarantined",
    "device_required",
    "model_loading",
]
# What not every placement can do, by the name of the request's parameter.
Feature = Literal["n", "logprobs", "beam_search", "language_detection", "word_timestamps"]
NOTHING: frozenset[Feature] = frozenset()


@dataclass(frozen=True, slots=True)
class Route:
    """The decision where a request runs, and why. `token_count` is the prompt's.

    `unproven`: the request requires the NPU, whose counter cannot be read, and the node lets such requests pass.
    `parts` say where each part of the model runs, if not all of it runs on `device`. `faults` counts the faults on
    demand of its engine.
    """

    model: str
    device: Device
    reason: RouteReason
    token_count: int
    emulated: bool = False
    unproven: bool = False
    parts: Mapping[str, Device] = field(default_factory=dict, compare=False)
    faults: int = 0


class Priority(StrEnum):
    """`interactive` work goes before `batch` work."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What every request carries, whatever its dialect.

    `arrived` and `deadline` are absolute monotonic times. A whole answer must be complete by the `deadline`, a streamed
    one must have begun; `ends` is when a streamed one must have ended. `require_device` forbids every other placement.
    An `interactive` request goes before batch work. A generation needs room for `min_new_tokens` after its prompt. For
    an engine that is started at start-up or after a crash, and for memory, it waits at most `restart_wait_s` seconds
    (None: until its deadline). With `own_proof` the caller holds the NPU that it requires and reads its counter, so no
    attempt is repeated. If engines of other nodes died under it, `engine_deaths`, it runs alone, until one dies here.
    """

    request_id: str
    arrived: float
    deadline: float
    ends: float = math.inf
    interactive: bool = True
    require_device: Device | None = None
    min_new_tokens: int = 1
    restart_wait_s: float | None = None
    engine_deaths: int = 0
    own_proof: bool = False

    def restart_by(self, now: float) -> float:
        """Until when a request that begins to wait at `now` waits for an engine that no request has loaded."""
        return self.deadline if self.restart_wait_s is None else min(self.deadline, now + self.restart_wait_s)


class Energy(msgspec.Struct, frozen=True, array_like=True):
    """The joules that a run used; None where they were not measured, for a `reason`."""

    joules: float | None = None
    reason: str | None = None

    def plus(self, other: Energy) -> Energy:
        """The energy of both; unknown where one of them is, since a part would be taken for all."""
        if self.joules is None or other.joules is None:
            return self if self.joules is None else other
        return Energy(self.joules + other.joules)

    def part(self, count: int) -> Energy:
        """The share of one of `count` that used it together."""
        return self if self.joules is None else Energy(self.joules / count)


class Busy(msgspec.Struct, frozen=True, array_like=True):
    """What a run took: the NPU's busy time in microseconds, None where it was not measured, and the energy.

    `shared`: others are known to have used the NPU too. False means unknown: the counter cannot show exclusive use.
    """

    us: int | None = None
    shared: bool = False
    energy: Energy = Energy(reason="not measured")

    def plus(self, other: Busy) -> Busy:
        """What both runs took; a busy time that was not measured counts as none."""
        measured = [us for us in (self.us, other.us) if us is not None]
        total = sum(measured) if measured else None
        return Busy(total, self.shared or other.shared, self.energy.plus(other.energy))


NOT_MEASURED = Busy()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out, as the model's own tokenizer counts them; `reasoning_tokens` are among those out.

    `cached_tokens` of the prompt's were in the prefix cache; None where that is not known.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of each stage. `total` and `first_token` count from the request's arrival.

    `inference` is the time on the device: the batches that held an embedding's texts, or a generation from its start in
    the engine to its end.
    """

    queue: float
    tokenize: float
    inference: float
    total: float
    first_token: float | None = None
