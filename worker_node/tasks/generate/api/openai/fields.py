"""Fields that several of OpenAI's bodies share."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from worker_node.api.body import DialectBody
from worker_node.api.keep_alive import KeepAlive
from worker_node.api.parameters import MAX_STOP_SEQUENCES, RepetitionPenalty
from worker_node.core.types import Priority, RequestContext
from worker_node.tasks.generate.api.openai.guided import GuidedFields
from worker_node.tasks.generate.api.openai.stream import UsageOfChunks

# What the schema takes; a model's own best_of_limit decides.
MAX_CHOICES = 128

NumberOf = Annotated[int, Field(ge=1, le=1_000_000)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(DialectBody):
    """What a stream holds besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(GuidedFields):
    """Sampling parameters of OpenAI, and what local servers add: top_k, min_p, repetition_penalty, ignore_eos."""

    model: str
    max_tokens: NumberOf | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=10_000_000)] | None = None
    n_predict: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    num_ctx: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    keep_alive: KeepAlive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def usage_of_chunks(self) -> UsageOfChunks:
        """What a stream tells of its tokens."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return UsageOfChunks.NONE
        return UsageOfChunks.SO_FAR if options.continuous_usage_stats else UsageOfChunks.AT_THE_END

    def urgency(self, context: RequestContext) -> RequestContext:
        """The context with the priority of vLLM's field: what is above 0 may wait and is batch work."""
        return context if (self.priority or 0) <= 0 else replace(context, priority=Priority.BATCH)

    @property
    def keep_last(self) -> int | None:
        """How many of the prompt's last tokens count. vLLM's 0 leaves nothing to continue, so it cuts nothing."""
        return self.truncate_prompt_tokens or None
