"""A call as the backends get it, whichever of them serves it."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from backend_client._resilience.deadline import Deadline
from backend_client.results import CallOptions, EmbedBatch, GenerateResult, Priority

J = TypeVar("J", bound="Job")

_COMMON = frozenset(CallOptions.__annotations__)


def new_request_id() -> str:
    """An id as nodes make them: `req_` and 24 hex digits. It must be unlike all others, not hard to guess."""
    return f"req_{random.getrandbits(96):024x}"


@dataclass(slots=True, kw_only=True)
class Job:
    """What all calls have. `trace` are the headers that tie a node's spans to the caller's (W3C trace context)."""

    deadline: Deadline
    request_id: str = field(default_factory=new_request_id)
    model: str | None = None
    priority: Priority = "interactive"
    require_device: str | None = None
    local_only: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)

    def within(self, deadline: Deadline) -> Self:
        """The same job with less time."""
        return replace(self, deadline=deadline)


@dataclass(slots=True, kw_only=True)
class EmbedJob(Job):
    """Texts for one request. `space` and `dimensions` are what the vectors must have, where that is known;
    `context_limit` is the most tokens of a text that their model takes.
    """

    texts: Sequence[str] = field(repr=False)
    truncate: bool = False
    space: str | None = None
    dimensions: int | None = None
    context_limit: int | None = None


@dataclass(slots=True, kw_only=True)
class GenerateJob(Job):
    """A prompt. `sampling` holds what the caller gave of `GenerateOptions`, and nothing else."""

    prompt: str = field(repr=False)
    sampling: Mapping[str, Any]


Answer: TypeAlias = AsyncGenerator[str | GenerateResult, None]
"""Pieces of text, as they come; the result is the last item."""


class Backend(Protocol):
    """What can do the work: the fleet, the cloud, or the two in that order."""

    async def embed(self, job: EmbedJob) -> EmbedBatch:
        """Embed the texts in one request."""
        ...

    async def generate(self, job: GenerateJob) -> GenerateResult:
        """Answer the prompt."""
        ...

    async def open_stream(self, job: GenerateJob, opened_by: Deadline | None = None) -> Answer:
        """Return once the first piece of the answer is there, at the latest at `opened_by` (else the deadline)."""
        ...

    def concurrency(self) -> int:
        """How many batches of one `embed_many` may be under way at once."""
        ...

    async def close(self) -> None:
        """Release connections and tasks."""
        ...


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Common options without `timeout`, and the others."""
    common = {name: value for name, value in options.items() if name in _COMMON and name != "timeout"}
    others = {name: value for name, value in options.items() if name not in _COMMON}
    return common, others
