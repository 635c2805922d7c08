"""Options of the embedding engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from worker_node.core.types import ModelKind
from worker_node.encoders.jobs import DynamicEncoderOptions, StaticEncoderOptions
from worker_node.engines.options import declare


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
    runner: ClassVar[str] = "worker_node.encoders.static:StaticEncoder"

    engine: Literal["embedding_static"] = "embedding_static"
