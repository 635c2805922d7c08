"""Models, devices, and where a request runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


class Device(StrEnum):
    """Where a model can run."""

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
    "unsupported_on_npu",
    "device_unavailable",
    "device_quarantined",
    "device_required",
    "model_loading",
]


@dataclass(frozen=True, slots=True)
class Route:
    """The decision where a request runs, and why. `token_count` is the prompt's.

    `unproven`: the request requires the NPU, whose counter cannot be read, and the node lets such requests pass.
    `parts` say where each part of the model runs, if not all of it runs on `device`.
    """

    model: str
    device: Device
    reason: RouteReason
    token_count: int
    emulated: bool = False
    unproven: bool = False
    parts: Mapping[str, Device] = field(default_factory=dict, compare=False)
