"""Where a request runs, and why: a pure decision over the state of each placement.

The route is the first placement, in the model's own order, that can serve now, supports what the request asks for, and
holds its prompt. The length of the answer does not count: it ends at the limit of the placement's window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from worker_node.core.errors import (
    ContextLengthExceeded,
    DeviceUnavailable,
    EngineUnavailable,
    ModelLoading,
    NodeError,
    UnsupportedParameter,
)
from worker_node.core.types import Device, RouteReason

Obstacle = Literal["device_unavailable", "device_quarantined", "model_loading"]
# What not every placement can do, by the name of the request's parameter.
Feature = Literal["n", "logprobs", "language_detection"]
NOTHING: frozenset[Feature] = frozenset()
# The parameter, what the placement says of it, and what to do.
_FEATURES: dict[Feature, tuple[str, str, str]] = {
    "n": ("n", "gives one answer at a time", "leave out n"),
    "logprobs": ("logprobs", "gives no log probabilities", "leave out logprobs"),
    "language_detection": ("language", "does not detect the language of speech", "set language"),
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One placement as routing sees it.

    `prompt_limit` bounds the prompt and `total_limit` prompt and output together, both in tokens; `lacks` is what it
    can never do. `obstacle` says why it cannot serve now, `detail` in words; None means that it can. Then it is likely
    to be ready in `ready_in` seconds (inf: nobody knows; None: not soon, or not by itself), `on_request`: because a
    request has or would have it loaded. `shortage` says why it waits for memory.
    """

    device: Device
    prompt_limit: int
    total_limit: int
    obstacle: Obstacle | None = None
    detail: str | None = None
    retry_after: float | None = None
    lacks: frozenset[Feature] = NOTHING
    ready_in: float | None = None
    on_request: bool = False
    shortage: str | None = None

    def holds(self, prompt_tokens: int, min_new_tokens: int) -> bool:
        """Whether the prompt fits, with room for so many new tokens."""
        return prompt_tokens <= self.prompt_limit and prompt_tokens + min_new_tokens <= self.total_limit

    def suits(self, prompt_tokens: int, min_new_tokens: int, needs: frozenset[Feature]) -> bool:
        """Whether it could run the request if nothing stood in the way."""
        return not self.lacks & needs and self.holds(prompt_tokens, min_new_tokens)


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
    min_new_tokens: int = 0,
    needs: frozenset[Feature] = NOTHING,
    require: Device | None = None,
) -> Decision:
    """Return the placement for a request.

    Raises UnsupportedParameter if no placement supports what it needs, ContextLengthExceeded if its prompt does not fit
    those that do, DeviceUnavailable if the required device cannot serve, ModelLoading or EngineUnavailable (with a time
    to retry after) if the suitable ones are not up.
    """
    allowed = [(i, c) for i, c in enumerate(candidates) if require is None or c.device == require]
    if not allowed:
        raise DeviceUnavailable(f"{model} has no placement on {require} on this node", param="model")
    passed_over: RouteReason | None = None
    blocked: Candidate | None = None
    for index, candidate in allowed:
        if candidate.lacks & needs:
            passed_over = passed_over or "unsupported_on_npu"
        elif not candidate.holds(prompt_tokens, min_new_tokens):
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
        able = [c for _, c in allowed if not c.lacks & needs]
        if not able:
            raise _unsupported(model, allowed[0][1], needs)
        raise _too_long(model, able, prompt_tokens, min_new_tokens)
    error = _not_up(model, blocked, require)
    error.model, error.device = model, blocked.device.value
    raise error


def _unsupported(model: str, candidate: Candidate, needs: frozenset[Feature]) -> UnsupportedParameter:
    param, says, remedy = _FEATURES[min(candidate.lacks & needs)]
    return UnsupportedParameter(f"{model} on {candidate.device} {says}; {remedy} or use another placement", param=param)


def _too_long(
    model: str, candidates: Sequence[Candidate], prompt_tokens: int, min_new_tokens: int
) -> ContextLengthExceeded:
    widest = max(candidates, key=lambda c: c.total_limit)
    asked = f" and needs room for {min_new_tokens} more" if min_new_tokens else ""
    return ContextLengthExceeded(
        f"the prompt has {prompt_tokens} tokens{asked}; {model} on {widest.device} takes at most "
        f"{widest.prompt_limit} in the prompt and {widest.total_limit} in all",
        param="prompt",
    )


def _not_up(model: str, blocked: Candidate, require: Device | None) -> NodeError:
    detail = f"{model} on {blocked.device}: {blocked.detail or blocked.obstacle}"
    if blocked.obstacle == "model_loading":
        return ModelLoading(f"{detail}; it is being loaded, try again later", retry_after=blocked.retry_after)
    if require is not None:
        return DeviceUnavailable(f"{detail}; the request requires {require}", retry_after=blocked.retry_after)
    return EngineUnavailable(f"{detail}; try again or use another node", retry_after=blocked.retry_after)
