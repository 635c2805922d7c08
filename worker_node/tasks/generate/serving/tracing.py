"""The trace of a generation: its name and what was asked of it, in the words of GenAI's semantic conventions."""

from __future__ import annotations

from contextlib import AbstractContextManager

from worker_node.core.types import TokenIds
from worker_node.observability.tracing import Operation, Tracing
from worker_node.tasks.generate.serving.requests import GenerationRequest


def trace_generation(tracing: Tracing, request: GenerationRequest) -> AbstractContextManager[Operation]:
    """Trace the generation that runs while the block does."""
    return tracing.operation(_name(request), request.context, _of_sampling(request))


def _name(request: GenerationRequest) -> str:
    """`chat` for messages, `text_completion` for a prompt that is continued as it stands."""
    return "text_completion" if isinstance(request.prompt, str | TokenIds) else "chat"


def _of_sampling(request: GenerationRequest) -> dict[str, float | str]:
    """What was asked of a generation."""
    sampling = request.sampling
    found: dict[str, float | str] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }
    if sampling.max_new_tokens is not None:
        found["gen_ai.request.max_tokens"] = sampling.max_new_tokens
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed is not None:
        found["gen_ai.request.seed"] = sampling.seed
    return found
