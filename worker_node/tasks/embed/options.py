"""Options of the embedding engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from worker_node.core.types import ModelKind
from worker_node.encoders.jobs import DynamicEncoderOptions, StaticEncoderOptions
from worker_node.engines.options import Option, declare


@declare
@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(DynamicEncoderOptions):
    title: ClassVar[str] = "Embedding on CPU and GPU: dynamic shapes"
    task: ClassVar[str] = ModelKind.EMBEDDING
    runner: ClassVar[str] = "worker_node.encoders.dynamic:DynamicEncoder"

    engine: Literal["embedding"] = "embedding"


@declare
@dataclass(frozen=True, kw_only=True)
class StaticOptions(StaticEncoderOptions):
    title: ClassVar[str] = "Embedding on the NPU: static shapes"
    task: ClassVar[str] = ModelKind.EMBEDDING
    runner: ClassVar[str] = "worker_node.tasks.embed.packing:StaticEmbeddingRunner"

    engine: Literal["embedding_static"] = "embedding_static"
    npu_packing: Annotated[
        bool,
        Option(
            "texts that wait together run one after another in one row instead of a row each; faster on the emulated "
            "NPU, not measured on a real one, and not for npu_batch_size above 1"
        ),
    ] = False

    def compiled_in(self) -> dict[str, Any]:
        """See `BlobOptions`; blobs that were compiled before there was packing are those without it."""
        options = super().compiled_in()
        if not self.npu_packing:
            del options["npu_packing"]
        return options
