"""Requests for vectors, and the reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from worker_node.core.types import RequestContext, Route, Timing, Usage


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed with one model; `model` None means the node's default embedding model.

    A text may be given as token ids of the model's own tokenizer, special tokens included: it is taken as it stands.
    `input_type` (`query` or `document`) puts the model's own prompt before each text. `dimensions` None is as many as
    the model's vectors have.
    """

    context: RequestContext
    texts: tuple[str | tuple[int, ...], ...]
    model: str | None = None
    truncate: bool = False
    input_type: str | None = None
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingReply:
    """`vectors`: float32 (n, dimensions); comparable only to vectors of an equal `space`.

    `npu_busy_shared` says that others are known to have used the NPU, so that its busy time is not this run's alone.
    `device_tokens` are those that the device computed, padding included, where the engine counts them;
    `computed_tokens` are those of the texts that it computed. `cached` says that all vectors (hit) or some (partial)
    were computed for an earlier request. The request waited for `loading_s` seconds for its model to be loaded.
    """

    route: Route
    vectors: npt.NDArray[np.float32]
    space: str
    usage: Usage
    timing: Timing
    npu_busy_delta_us: int | None = None
    npu_busy_shared: bool = False
    device_tokens: int | None = None
    computed_tokens: int = 0
    cached: Literal["hit", "partial"] | None = None
    loading_s: float = 0.0
