"""Options of the embedding engine of CPU and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from worker_node.core.types import ModelKind
from worker_node.encoders.jobs import DynamicEncoderOptions
from worker_node.settings.declaration import declare


@declare
@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(DynamicEncoderOptions):
    """See `DynamicEncoderOptions`."""

    title: ClassVar[str] = "Embedding on CPU and GPU: dynamic shapes"
    task: ClassVar[str] = ModelKind.EMBEDDING
    runner: ClassVar[str] = "worker_node.tasks.embed.runners:EmbeddingRunner"

    engine: Literal["embedding"] = "embedding"
