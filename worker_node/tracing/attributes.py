"""The attributes of spans: GenAI's semantic conventions where they have a name, `npu.` where they have none.

Numbers and names that the node made itself, and nothing of a request's text: no prompt, answer, stop sequence, tool,
user's name for a model, or key.
"""

from __future__ import annotations

from opentelemetry.util.types import AttributeValue

from worker_node.domain import Route, Usage

Attributes = dict[str, AttributeValue]

# Those of a route that the engine's own span repeats.
ENGINE = ("gen_ai.response.model", "npu.device", "npu.emulated")


def of_operation(name: str) -> Attributes:
    """What every inference has."""
    return {"gen_ai.operation.name": name, "gen_ai.provider.name": "npu-node"}


def of_route(route: Route) -> Attributes:
    """Where it runs, and why there.

    The model that was asked for is told by the id that its name stands for: the name itself is the user's text.
    """
    return {
        "gen_ai.request.model": route.model,
        "gen_ai.response.model": route.model,
        "gen_ai.usage.input_tokens": route.token_count,
        "npu.device": route.device.value,
        "npu.emulated": route.emulated,
        "npu.route_reason": route.reason,
    }


def of_answer(usage: Usage, finish_reason: str | None, cached: str | None) -> Attributes:
    """What came of it."""
    found: Attributes = {"gen_ai.usage.input_tokens": usage.prompt_tokens}
    if finish_reason is not None:
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
        found["gen_ai.response.finish_reasons"] = [finish_reason]
    if cached is not None:
        found["npu.cache"] = cached
    return found


def of_busy_time(busy_us: int | None, *, shared: bool) -> Attributes:
    """The NPU's measured busy time; nothing where no NPU ran.

    `npu.busy_exclusive` is there only as False, where others are known to have used the NPU: the rest cannot be known.
    """
    if busy_us is None:
        return {}
    found: Attributes = {"npu.busy_time_us": busy_us}
    if shared:
        found["npu.busy_exclusive"] = False
    return found
