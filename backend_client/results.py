"""What calls take and return: plain frozen data. Texts and vectors are kept out of every repr."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypedDict

import numpy as np
import numpy.typing as npt

Source = Literal["npu", "cloud"]
Priority = Literal["interactive", "batch"]
Device = Literal["NPU", "GPU", "CPU"]


class CallOptions(TypedDict, total=False):
    """What every call takes; None means not given. Calls check names and types against these declarations.

    `timeout`: seconds for the whole call, retries and fallback included. `model`: as the nodes name it, else their
    default. `require_device`: no other device may run it. `local_only`: never the cloud, whatever the settings say.
    """

    timeout: float | None
    model: str | None
    priority: Priority | None
    require_device: Device | None
    local_only: bool | None


class EmbedOptions(CallOptions, total=False):
    """`truncate`: cut a text that is too long instead of refusing it."""

    truncate: bool | None


class GenerateOptions(CallOptions, total=False):
    """Sampling; what is not given is the node's default (greedy). `raw` skips the model's chat template."""

    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    stop: str | list[str] | None
    seed: int | None
    raw: bool | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try. `outcome` is "ok" or the error's class name; times are seconds, `started` since the call began.

    `source` is what was asked: a node or the cloud; `node` is its URL.
    """

    node: str
    outcome: str
    started: float
    duration: float
    sent: bool = True
    status: int | None = None
    code: str | None = None
    source: Source = "npu"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out, as the model's tokenizer counts them."""

    prompt_tokens: int
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who answered. `node` is its URL, or the cloud's; `device` is None for the cloud.

    `npu_busy_delta_us` is the measured busy time of the NPU in microseconds, None where no NPU ran; `emulated` is True
    when that NPU was emulated.
    """

    source: Source
    node: str
    model: str
    device: str | None
    request_id: str
    attempts: tuple[Attempt, ...] = ()
    route_reason: str | None = None
    npu_busy_delta_us: int | None = None
    emulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult(Origin):
    """One text's vector. Only vectors of an equal `space` may be compared."""

    vector: list[float] = field(repr=False)
    space: str
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedBatch(Origin):
    """Vectors of one request, float32 (n, d), in the order of its texts."""

    vectors: npt.NDArray[np.float32] = field(repr=False)
    space: str
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedManyResult:
    """Vectors of many texts, float32 (n, d), in their order, all of one `space` (None when there were no texts).

    `served` counts texts by who embedded them.
    """

    vectors: npt.NDArray[np.float32] = field(repr=False)
    space: str | None
    usage: Usage
    served: dict[str, int]
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds, as the node measured them; None where it did not say."""

    queue: float | None = None
    tokenize: float | None = None
    first_token: float | None = None
    generate: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult(Origin):
    """An answer. `finish_reason` is "stop" or "length"."""

    text: str = field(repr=False)
    finish_reason: str
    usage: Usage
    timing: Timing
