"""A call as the backends get it, whichever of them serves it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from backend_client._protocol.dialect import FORMS, StreamEvent, StreamForm
from backend_client._protocol.numbers import check_numbers
from backend_client._protocol.report import ModelKind, ModelReport
from backend_client._protocol.request_ids import new_request_id
from backend_client._protocol.transcripts import TRANSCRIPTS
from backend_client._protocol.wire import Reply
from backend_client._resilience.deadline import Deadline
from backend_client.errors import InvalidArgument
from backend_client.results import CallOptions, EmbedBatch, GenerateResult, Priority, RawReply

J = TypeVar("J", bound="Job")

_COMMON = frozenset(CallOptions.__annotations__)
# A body that has one of them means an option of the call, or of the SDK, which would be lost.
_NO_FIELDS = ("local_only", "require_device", "extra_headers", "extra_body", "extra_query")


@dataclass(slots=True, kw_only=True)
class Job:
    """What all calls have.

    `extra_headers` are the caller's, for nodes, and for the cloud where its settings list them; `trace` are those that
    tie a node's spans to the caller's (W3C trace context). `cloud_takes_over`: whether the cloud gets it when
    no node can take it now; None: no.
    """

    deadline: Deadline
    request_id: str = field(default_factory=new_request_id)
    model: str | None = None
    priority: Priority = "interactive"
    require_device: str | None = None
    local_only: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)
    extra_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    cloud_takes_over: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)

    @property
    def node_headers(self) -> Mapping[str, str]:
        """The headers that nodes get beside the usual ones."""
        return {**self.extra_headers, **self.trace} if self.extra_headers else self.trace

    def within(self, deadline: Deadline) -> Self:
        """The same job with less time."""
        return replace(self, deadline=deadline)


@dataclass(slots=True, kw_only=True)
class EmbedJob(Job):
    """Texts for one request. `dimensions` is what the caller asked for.

    In the cloud `space` and `dimensions` are what the vectors must have, where that is known; `context_limit` is the
    most tokens of a text that their model takes.
    """

    texts: Sequence[str] = field(repr=False)
    truncate: bool = False
    input_type: str | None = None
    space: str | None = None
    dimensions: int | None = None
    context_limit: int | None = None

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a wrong number."""
        check_numbers({"dimensions": self.dimensions})


@dataclass(slots=True, kw_only=True)
class GenerateJob(Job):
    """A prompt. `sampling` holds what the caller gave of `GenerateOptions`, and nothing else."""

    prompt: str = field(repr=False)
    sampling: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a wrong number."""
        check_numbers(self.sampling)


@dataclass(slots=True, kw_only=True)
class Exchange(Job):
    """A request in OpenAI's dialect, sent as it is but for the model's name.

    `body` is JSON without `model`; with a `file` (name and bytes) its fields and the file are sent as a form. `node`:
    only this one can serve it. `refused` gets the replies of nodes that refused it, for callers who hand them on.
    """

    path: str
    kind: ModelKind = "generation"
    method: str = "POST"
    body: Mapping[str, Any] | None = field(default=None, repr=False)
    file: tuple[str, bytes] | None = field(default=None, repr=False)
    node: str | None = None
    refused: list[Reply] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a wrong number, or an option of the call among the fields of the body."""
        for name in _NO_FIELDS:
            if name in (self.body or ()):
                option = f"give the option {name}" if name in _COMMON else "put its fields into the body itself"
                raise InvalidArgument(f"the body has {name}: {option}", param=name)
        # The fields of a form are texts.
        if self.file is None:
            check_numbers(self.body or {}, self.path)

    @property
    def only_on_nodes(self) -> str | None:
        """Why no cloud serves it, or None."""
        if self.path == "/v1/chat/completions" and self.method == "POST":
            return None
        if self.path == "/v1/embeddings":
            return "of /v1/embeddings it serves texts without other fields only: call embed or embed_many"
        return f"it serves chats and embeddings only, and this is {self.path}"

    @property
    def form(self) -> StreamForm | None:
        """How its answer is streamed; None where it comes whole."""
        if self.file is not None:
            return TRANSCRIPTS if self.body and self.body.get("stream") else None
        return FORMS.get(self.path) if self.method == "POST" else None


EventStream: TypeAlias = AsyncGenerator[StreamEvent | RawReply, None]
"""Events as they come; the last item is who answered, with the usage and without a body."""

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

    async def exchange(self, job: Exchange) -> RawReply:
        """The whole reply to a request in OpenAI's dialect."""
        ...

    async def open_exchange(self, job: Exchange, opened_by: Deadline | None = None) -> EventStream:
        """Return once a part of the answer is there; what came before it is among the first events."""
        ...

    async def models(self) -> Sequence[ModelReport]:
        """The models of all nodes, as they report them; none for the cloud."""
        ...

    def concurrency(self) -> int:
        """How many batches of one `embed_many` may be under way at once."""
        ...

    async def close(self) -> None:
        """Release connections and tasks."""
        ...


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Common options as fields of a Job, and the others."""
    common = {name: value for name, value in options.items() if name in _COMMON and name != "timeout"}
    others = {name: value for name, value in options.items() if name not in _COMMON}
    return common, others
