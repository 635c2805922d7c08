"""Fields that several of OpenAI's bodies share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from worker_node.api.body import DialectBody

# What the schema takes; a model's own best_of_limit decides.
MAX_CHOICES = 128

NumberOf = Annotated[int, Field(ge=1, le=1_000_000)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(DialectBody):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(DialectBody):
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
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)
