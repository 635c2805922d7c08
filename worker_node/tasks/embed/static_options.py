"""Options of the embedding engine of the NPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from worker_node.domain import ModelKind
from worker_node.encoders.options import StaticEncoderOptions
from worker_node.options.declaration import declare


@declare
@dataclass(frozen=True, kw_only=True)
class StaticOptions(StaticEncoderOptions):
    """See `StaticEncoderOptions`."""

    title: ClassVar[str] = "Embedding on the NPU: static shapes"
    task: ClassVar[str] = ModelKind.EMBEDDING
    runner: ClassVar[str] = "worker_node.tasks.embed.runners:StaticEmbeddingRunner"

    engine: Literal["embedding_static"] = "embedding_static"
