"""Where a request runs, and why: a pure decision over what is known of each placement.

The route is the first placement, in the model's own order, that can serve now and whose limits hold the prompt and the
output asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from worker_node.domain import Device, RouteReason
from worker_node.errors import (
    ContextLengthExceeded,
    DeviceUnavailable,
    EngineUnavailable,
    ModelLoading,
    NodeError,
)

Obstacle = Literal["device_unavailable", "device_quarantined", "model_loading"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One placement as routing sees it.

    `prompt_limit` bounds the prompt and `total_limit` prompt and output together, both in tokens. `obstacle` says why
    it cannot serve now, `detail` in words; None means that it can.
    """

    device: Device
    prompt_limit: int
    total_limit: int
    obstacle: Obstacle | None = None
    detail: str | None = None
    retry_after: float | None = None

    def holds(self, prompt_tokens: int, max_new_tokens: int) -> bool:
        """Whether prompt and output fit."""
        return prompt_tokens <= self.prompt_limit and prompt_tokens + max_new_tokens <= self.total_limit


@dataclass(frozen=True, slots=True)
class Decision:
    """The index of the chosen candidate, and why it and not an earlier one."""

    index: int
    reason: RouteReason


def choose(
    model: str,
    candidates: Sequence[Candidate],
    *,
    prompt_tokens: int,
    max_new_tokens: int = 0,
    require: Device | None = None,
) -> Decision:
    """Return the placement for a request.

    Raises ContextLengthExceeded if it fits none, DeviceUnavailable if the required device cannot serve,
    ModelLoading or EngineUnavailable (with a time to retry after) if those that it fits are not up.
    """
    allowed = [(i, c) for i, c in enumerate(candidates) if require is None or c.device == require]
    if not allowed:
        raise DeviceUnavailable(f"{model} has no placement on {require} on this node", param="model")
    passed_over: RouteReason | None = None
    blocked: Candidate | None = None
    for index, candidate in allowed:
        if not candidate.holds(prompt_tokens, max_new_tokens):
            passed_over = passed_over or "context_exceeds_npu"
        elif candidate.obstacle is not None:
            passed_over = passed_over or candidate.obstacle
            # Of those that cannot serve, the one that is being loaded will soonest.
            if blocked is None or (candidate.obstacle == "model_loading" and blocked.obstacle != "model_loading"):
                blocked = candidate
        elif require is not None:
            return Decision(index, "device_required")
        else:
            return Decision(index, passed_over or "preferred")
    if blocked is None:
        raise _too_long(model, [c for _, c in allowed], prompt_tokens, max_new_tokens)
    error = _not_up(model, blocked, require)
    error.model, error.device = model, blocked.device.value
    raise error


def _too_long(
    model: str, candidates: Sequence[Candidate], prompt_tokens: int, max_new_tokens: int
) -> ContextLengthExceeded:
    widest = max(candidates, key=lambda c: c.total_limit)
    asked = f" and {max_new_tokens} new tokens were asked for" if max_new_tokens else ""
    return ContextLengthExceeded(
        f"the prompt has {prompt_tokens} tokens{asked}; {model} on {widest.device} takes at most "
        f"{widest.prompt_limit} in the prompt and {widest.total_limit} in all",
        param="prompt",
    )


def _not_up(model: str, blocked: Candidate, require: Device | None) -> NodeError:
    detail = f"{model} on {blocked.device}: {blocked.detail or blocked.obstacle}"
    if blocked.obstacle == "model_loading":
        return ModelLoading(f"{detail}; it is being loaded, try again", retry_after=blocked.retry_after)
    if require is not None:
        return DeviceUnavailable(f"{detail}; the request requires {require}", retry_after=blocked.retry_after)
    return EngineUnavailable(f"{detail}; try again or use another node", retry_after=blocked.retry_after)
