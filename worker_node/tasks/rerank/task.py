"""The registration of the task, its options, and the known answers in the files of its models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from worker_node.encoders.jobs import DynamicEncoderOptions, StaticEncoderOptions
from worker_node.engines.options import Option, Options, declare
from worker_node.registry import Task

RERANK = "rerank"


@declare
@dataclass(frozen=True, kw_only=True)
class RerankOptions(Options):
    """What requests may ask for."""

    title: ClassVar[str] = "Reranking"
    task: ClassVar[str] = RERANK

    documents_limit: Annotated[int, Ge(1), Option("documents that a request may have")] = 1000


@declare
@dataclass(frozen=True, kw_only=True)
class DynamicRerankOptions(DynamicEncoderOptions):
    title: ClassVar[str] = "Reranking on CPU and GPU: dynamic shapes"
    task: ClassVar[str] = RERANK

    engine: Literal["rerank"] = "rerank"


@declare
@dataclass(frozen=True, kw_only=True)
class StaticRerankOptions(StaticEncoderOptions):
    title: ClassVar[str] = "Reranking on the NPU: static shapes"
    task: ClassVar[str] = RERANK

    engine: Literal["rerank_static"] = "rerank_static"


@dataclass(frozen=True, slots=True)
class RerankCanary:
    """Pairs of query and document, and their logits, one row a pair; each must be met within `tolerance`."""

    pairs: tuple[tuple[str, str], ...]
    logits: tuple[tuple[float, ...], ...]
    tolerance: float

    def __post_init__(self) -> None:
        if not self.pairs or len(self.pairs) != len(self.logits):
            raise ValueError(f"{len(self.pairs)} pairs but {len(self.logits)} logits")


TASK = Task(
    kind=RERANK,
    verb="rerank",
    capability="rerank",
    options=(__name__,),
    serving="worker_node.tasks.rerank.service:SERVING",
    api="worker_node.tasks.rerank.http:API",
    files="worker_node.tasks.rerank.conversion:FILES",
)
