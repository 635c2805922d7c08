"""Options of reranking models and their engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from worker_node.encoders.jobs import DynamicEncoderOptions, StaticEncoderOptions
from worker_node.engines.options import Option, Options, declare
from worker_node.tasks.rerank.task import RERANK


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
    runner: ClassVar[str] = "worker_node.encoders.dynamic:DynamicEncoder"

    engine: Literal["rerank"] = "rerank"


@declare
@dataclass(frozen=True, kw_only=True)
class StaticRerankOptions(StaticEncoderOptions):
    title: ClassVar[str] = "Reranking on the NPU: static shapes"
    task: ClassVar[str] = RERANK
    runner: ClassVar[str] = "worker_node.encoders.static:StaticEncoder"

    engine: Literal["rerank_static"] = "rerank_static"
