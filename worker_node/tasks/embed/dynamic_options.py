"""Options of the embedding engine of CPU and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from worker_node.domain import Device, ModelKind
from worker_node.options.declaration import EngineOptions, Option, declare


@declare
@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(EngineOptions):
    """Precision, streams and batches. `max_batch_tokens` None takes what was measured to be best for the device."""

    title: ClassVar[str] = "Embedding on CPU and GPU: dynamic shapes"
    task: ClassVar[str] = ModelKind.EMBEDDING
    devices: ClassVar[frozenset[Device]] = frozenset({Device.CPU, Device.GPU})
    runner: ClassVar[str] = "worker_node.tasks.embed.dynamic:EmbeddingRunner"

    engine: Literal["embedding"] = "embedding"
    precision: Annotated[
        str | None, Option("OpenVINO's inference precision, for example f32 or bf16", default="the device's own")
    ] = None
    streams: Annotated[
        int, Ge(0), Le(64), Option("batches that run at the same time; 0 leaves it to the device", also=("nireq",))
    ] = 0
    max_batch_tokens: Annotated[
        int | None, Gt(0), Option("tokens of one batch, padding included", default="512 on a CPU, 8192 on a GPU")
    ] = None
    max_batch_rows: Annotated[int, Gt(0), Option("texts of one batch")] = 64
