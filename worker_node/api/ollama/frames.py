"""The frames of Ollama's replies: when, how many tokens, how long; all of it measured."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from worker_node.api.busy import busy_fields
from worker_node.core.types import Finished, FinishReason

_NS_PER_MS = 1e6


def now() -> str:
    """The time as RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def frame(model: str, **fields: Any) -> dict[str, Any]:
    """A frame; `model` is the name that the client used."""
    return {"model": model, "created_at": now(), **fields}


@dataclass(frozen=True, slots=True)
class Loading:
    """How long the request waited for its model to be loaded, in seconds."""

    seconds: float = 0.0

    @property
    def nanoseconds(self) -> int:
        """The same in nanoseconds."""
        return round(self.seconds * 1e9)


def ending(finished: Finished, loading: Loading) -> dict[str, Any]:
    """The fields of the last frame.

    Reading the prompt lasts from the start in the engine to the first token, writing from there to the end.
    """
    timing = finished.timing
    started = timing.total - timing.inference
    reading = timing.inference if timing.first_token is None else max(0.0, timing.first_token - started)
    return {
        "done": True,
        "done_reason": "length" if finished.finish_reason is FinishReason.LENGTH else "stop",
        "total_duration": round(timing.total * _NS_PER_MS),
        "load_duration": loading.nanoseconds,
        "prompt_eval_count": finished.usage.prompt_tokens,
        "prompt_eval_duration": round(reading * _NS_PER_MS),
        "eval_count": finished.usage.completion_tokens,
        "eval_duration": round(max(0.0, timing.inference - reading) * _NS_PER_MS),
        **busy_fields([finished]),
    }
