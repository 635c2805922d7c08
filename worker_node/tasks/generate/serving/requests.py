"""What a request for text asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker_node.core.types import (
    AnswerSchema,
    GivenForm,
    Message,
    Rendering,
    RequestContext,
    Sampling,
    TokenIds,
    ToolUse,
)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to continue. Text and token ids are continued as they stand; messages go through the chat template.

    `sampling.max_new_tokens` None means as many as the placement allows. The answer is held to `grammar`: EBNF (see
    `grammars`), or what it is compiled from; with tools it may be calls instead, and is if one is forced.
    `think` turns the reasoning of models that can do with and without it on or off; with `split_reasoning` it is told
    apart from the answer. Prompt and answer together have at most `context_limit` tokens. Of the prompt only the last
    `keep_last` tokens count, -1 for as many as there is room for; with `drop_oldest` the oldest turns of a conversation
    that is too long are left out.
    """

    context: RequestContext
    prompt: str | TokenIds | tuple[Message, ...]
    sampling: Sampling
    model: str | None = None
    tool_use: ToolUse | None = None
    grammar: str | AnswerSchema | GivenForm | None = None
    think: bool | None = None
    split_reasoning: bool = False
    context_limit: int | None = None
    rendering: Rendering = field(default_factory=Rendering)
    keep_last: int | None = None
    drop_oldest: bool = False
