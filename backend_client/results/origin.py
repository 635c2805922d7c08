"""What every result has: who answered, after which attempts, and what it used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any, Literal

Source = Literal["npu", "cloud"]


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


class FailureKind(Enum):
    """What a failed attempt says of the node's health."""

    NONE = auto()
    CONNECTION = auto()
    SERVER = auto()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out, as the model's tokenizer counts them."""

    prompt_tokens: int
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who answered. `node` is its URL, or the cloud's; `device` is None for the cloud.

    `headers` are those of the node's reply, with their names in lower case.
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
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def origin_fields(reply: Origin) -> dict[str, Any]:
    """The fields of a result that say who answered, for another result."""
    return {part.name: getattr(reply, part.name) for part in fields(Origin)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawReply(Origin):
    """A reply of OpenAI's dialect as it came: `body` is its JSON, or its bytes where it is none."""

    status: int = 200
    body: Any = field(default=None, repr=False)
    usage: Usage = Usage(0)
