"""What the caller of a job asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backend_client.bulk.job import RESULT_COLUMNS, BulkJob, Kind
from backend_client.bulk.optional import schema_validator
from backend_client.errors import ConfigurationError
from backend_client.results import Device

ROWS_PER_FRAGMENT = {"embed": 50_000, "generate": 200}
"""Two to three minutes of work: at 300 texts a second, and at 1.5 answers a second."""

_POSITIVE = ("window", "attempts", "rows_per_fragment", "concurrency", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRequest:
    """A job, and how this run of it is to work.

    `source` is a path or URL, a directory or a glob; `out` a directory or prefix. `column` holds the texts, prompts or
    conversations (`messages`). `keep`: the input's columns that the output has; None: all. `options` are those of each
    call: `truncate`; `max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop`, `response_schema`.

    The rest may differ from run to run. `shard` is (i, n), i counted from 0. `window`: fragments under way at once.
    `concurrency`: requests under way at once, by default 3 batches, or 8 prompts, for every node. `attempts`: how often
    a fragment may fail before it is quarantined. `max_rejected`: the share of rows that may be rejected. `patience`:
    seconds to wait for a fleet that serves nothing. `timeout`: seconds of one request with its retries.
    """

    kind: Kind
    source: str
    out: str
    column: str
    messages: bool = False
    id_column: str | None = None
    keep: tuple[str, ...] | None = None
    model: str | None = None
    require_device: Device | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rows_per_fragment: int | None = None
    shard: tuple[int, int] | None = None
    window: int = 2
    concurrency: int | None = None
    attempts: int = 3
    max_rejected: float = 0.001
    patience: float = 600.0
    timeout: float | None = None
    allow_cloud: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigurationError for values that make no sense."""
        given = {name: getattr(self, name) for name in _POSITIVE}
        wrong = [f"{name} must be more than 0" for name, value in given.items() if value is not None and not value > 0]
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            wrong.append(f"shard {self.shard[0]}/{self.shard[1]} does not exist: shards are 0/n to n-1/n")
        if not self.patience >= 0:
            wrong.append("patience is a number of seconds, 0 or more")
        if not 0 <= self.max_rejected <= 1:
            wrong.append("max_rejected is a share of the rows, from 0 to 1")
        taken = [name for name in self.keep or () if name in {*RESULT_COLUMNS, "embeddings", "generated_text"}]
        if taken:
            wrong.append(f"the output adds a column {taken[0]}: it cannot be kept from the input")
        if wrong:
            raise ConfigurationError("; ".join(wrong))
        if "response_schema" in self.options:
            schema_validator(self.options["response_schema"])

    @property
    def rows(self) -> int:
        """The rows that a fragment should have."""
        return self.rows_per_fragment or ROWS_PER_FRAGMENT[self.kind]

    def job(self, listing: str, *, model: str, space: str, dimensions: int) -> BulkJob:
        """The job that this asks for."""
        return BulkJob(
            kind=self.kind,
            source=self.source,
            listing=listing,
            column=self.column,
            messages=self.messages,
            id_column=self.id_column,
            keep=self.keep,
            rows_per_fragment=self.rows,
            model=model,
            space=space,
            dimensions=dimensions,
            require_device=self.require_device,
            options=dict(self.options),
        )
