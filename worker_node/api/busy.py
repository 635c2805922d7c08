"""The NPU's busy time in replies: the native fields' names and meaning, wherever a dialect leaves room for them."""

from __future__ import annotations

from collections.abc import Iterable

from worker_node.core.types import Finished


def busy_time(ends: Iterable[Finished]) -> int | None:
    """The NPU's busy time over the generations in microseconds, or None where none was measured."""
    deltas = [end.npu_busy_delta_us for end in ends if end.npu_busy_delta_us is not None]
    return sum(deltas) if deltas else None


def busy_fields(ends: Iterable[Finished]) -> dict[str, int | bool]:
    """The busy time as fields, with whether others are known to have used the NPU; empty where nothing was measured.

    Streams send them in their last object, because their headers are gone by then.
    """
    ends = list(ends)
    busy_us = busy_time(ends)
    if busy_us is None:
        return {}
    shared = any(end.npu_busy_shared for end in ends)
    return {"npu_busy_delta_us": busy_us, **({"npu_busy_exclusive": False} if shared else {})}
