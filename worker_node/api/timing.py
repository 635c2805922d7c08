"""The duration of each stage of a request, as replies report it."""

from __future__ import annotations

from worker_node.core.types import Timing


def timing_ms(timing: Timing, *stages: str) -> dict[str, float | None]:
    """Milliseconds of these stages; None where a stage did not happen."""
    values = {stage: getattr(timing, stage) for stage in stages}
    return {stage: None if value is None else round(value, 3) for stage, value in values.items()}
