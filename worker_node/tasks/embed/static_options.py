"""Options of the embedding engine of the NPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le, Len

from worker_node.domain import Device, ModelKind
from worker_node.options.declaration import EngineOptions, Option, declare


@declare
@dataclass(frozen=True, kw_only=True)
class StaticOptions(EngineOptions):
    """Shapes. In an engine `npu_buckets` are ascending and never empty.

    `busy_counter` is the file of the NPU's busy counter, which the engine advances itself if `stand_in`.
    """

    title: ClassVar[str] = "Embedding on the NPU: static shapes"
    task: ClassVar[str] = ModelKind.EMBEDDING
    devices: ClassVar[frozenset[Device]] = frozenset({Device.NPU})
    runner: ClassVar[str] = "worker_node.tasks.embed.static:StaticEmbeddingRunner"

    engine: Literal["embedding_static"] = "embedding_static"
    npu_buckets: Annotated[
        tuple[Annotated[int, Ge(8)], ...],
        Len(1),
        Option(
            "lengths in tokens that the model is compiled for; a text runs in the smallest that holds it",
            default="32, 64, 128 … up to the model's limit",
        ),
    ] = ()
    npu_batch_size: Annotated[int, Ge(1), Le(64), Option("texts of one run")] = 1
    busy_counter: str | None = None
    stand_in: bool = False
