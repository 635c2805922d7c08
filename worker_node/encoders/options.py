"""Options that the engines of all encoders have; a task declares its own classes with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le, Len

from worker_node.core.types import Device
from worker_node.settings.declaration import BlobOptions, EngineOptions, Option


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
