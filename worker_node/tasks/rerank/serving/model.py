"""Reranking models, requests and replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from worker_node.core.types import RequestContext, Route, Timing, Usage
from worker_node.manager.served import ServedModel
from worker_node.tasks.rerank.options import RerankOptions
from worker_node.tasks.rerank.serving.tokenizer import PairTokenizer


@dataclass(frozen=True, slots=True)
class RerankModel(ServedModel):
    """A served reranking model; a request may have `documents_limit` documents."""

    tokenizer: PairTokenizer
    documents_limit: int = RerankOptions().documents_limit

    def facts(self) -> Mapping[str, Any]:
        """See `ServedModel.facts`."""
        return {"documents_limit": self.documents_limit}


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """Documents to score for a query with one model; `model` None means the node's default reranking model.

    Documents are cut at their end to `max_document_tokens`, and with `truncate` to what the model has room for. Errors
    call them by the request's `field`.
    """

    context: RequestContext
    query: str
    documents: tuple[str, ...]
    model: str | None = None
    truncate: bool = False
    max_document_tokens: int | None = None
    field: str = "documents"


@dataclass(frozen=True, slots=True)
class RerankReply:
    """`logits`: the log-odds that each document matches the query, f64 (n,), in the request's order.

    The NPU's busy time and device tokens are as in `EmbeddingReply`.
    """

    route: Route
    logits: npt.NDArray[np.float64]
    usage: Usage
    timing: Timing
    npu_busy_delta_us: int | None = None
    npu_busy_shared: bool = False
    device_tokens: int | None = None
    loading_s: float = 0.0

    @property
    def scores(self) -> npt.NDArray[np.float64]:
        """How well each document matches, from 0 to 1."""
        return 1.0 / (1.0 + np.exp(-np.clip(self.logits, -700.0, 700.0)))

    def ranking(self) -> list[int]:
        """The documents' places in the request, best first; equal ones stay in the request's order."""
        return [int(index) for index in np.argsort(-self.logits, kind="stable")]


def log_odds(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The log-odds of a match, f64 [n], from a classifier's logits, f32 [n, labels].

    With one label that is its logit (so the score is its sigmoid); with two the second's less the first's (so the score
    is the softmax of the second).
    """
    wide = rows.astype(np.float64)
    return wide[:, 0] if wide.shape[1] == 1 else wide[:, 1] - wide[:, 0]
