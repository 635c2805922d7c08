"""Static shapes of engines that run each text in the smallest of a few lengths that holds it."""

from __future__ import annotations

from typing import Any

from worker_node.serving.task import Shapes
from worker_node.settings import ModelSettings

# Questions have 8 to 24 tokens. Above 32 each further length would spare less than the memory of its copy of the model.
_SHORT = (16, 24)
_DOUBLED = 32


def buckets_up_to(limit: int) -> tuple[int, ...]:
    """16, 24, 32, 64, 128 … and the limit itself, in tokens."""
    buckets = [length for length in _SHORT if length < limit]
    length = _DOUBLED
    while length < limit:
        buckets.append(length)
        length *= 2
    return (*buckets, limit)


def bucket_shapes(limit: int, wanted: ModelSettings, values: dict[str, Any]) -> Shapes:
    """The shapes for a model of so many tokens; `npu_buckets` of `values` is completed. Raises ConfigurationError."""
    buckets = tuple(sorted(set(values.get("npu_buckets") or buckets_up_to(limit))))
    if buckets[-1] > limit:
        raise wanted.error("npu_buckets", f"a bucket of {buckets[-1]} tokens, the model takes {limit}")
    values["npu_buckets"] = buckets
    return Shapes((*buckets, values.get("npu_batch_size", 1)), buckets[-1], buckets[-1])
