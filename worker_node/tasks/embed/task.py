"""The registration of the task, and the options of its engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from worker_node.core.types import ModelKind
from worker_node.encoders.jobs import DynamicEncoderOptions, StaticEncoderOptions
from worker_node.engines.options import declare
from worker_node.registry import Task


@declare
@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(DynamicEncoderOptions):
    title: ClassVar[str] = "Embedding on CPU and GPU: dynamic shapes"
    task: ClassVar[str] = ModelKind.EMBEDDING

    engine: Literal["embedding"] = "embedding"


@declare
@dataclass(frozen=True, kw_only=True)
class StaticOptions(StaticEncoderOptions):
    title: ClassVar[str] = "Embedding on the NPU: static shapes"
    task: ClassVar[str] = ModelKind.EMBEDDING

    engine: Literal["embedding_static"] = "embedding_static"


TASK = Task(
    kind=ModelKind.EMBEDDING,
    verb="embed",
    capability="embedding",
    options=(__name__,),
    serving="worker_node.tasks.embed.service:EMBED",
    api="worker_node.tasks.embed.http:API",
)
