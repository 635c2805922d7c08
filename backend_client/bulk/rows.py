"""Rows of a fragment: chunks as they are read, and rows that are rejected."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHUNK_BYTES = 8 * 1024 * 1024
"""A chunk of so many bytes is full, however few rows it has."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rejected row and the reason; `count` rows from `row` on, where they cannot be told apart.

    `row` is the number of the row in its file; in JSONL, the offset of its line in bytes. `rest`: it stands for the
    rest of its file, of which the number of rows is unknown.
    """

    row: int
    reason: str
    id: Any = None
    count: int = 1
    rest: bool = False

    def line(self, file: str) -> bytes:
        """As a line of JSON."""
        known = {} if self.id is None else {"id": self.id}
        more: dict[str, Any] = {} if self.count == 1 else {"rows": self.count}
        more |= {"rest": True} if self.rest else {}
        entry = {**known, "file": file, "row": self.row, "reason": self.reason, **more}
        return json.dumps(entry, default=str).encode() + b"\n"


@dataclass(slots=True)
class Chunk:
    """Rows as they were read: `table` has their columns, `rows` their places, `inputs` what is sent for each.

    An input is None where there is none, and bytes where it is no valid text. `rejected` are rows that could not be
    read into the table at all.
    """

    table: Any
    rows: list[int]
    inputs: list[Any] = field(repr=False)
    rejected: list[Rejection]
    ids: list[Any] | None = None

    def id_of(self, index: int) -> Any:
        """The id of a row, None where the job has no id column."""
        return None if self.ids is None else self.ids[index]
