"""What a scripted node does instead of answering, and what it was sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Step:
    """What a node does with one request instead of answering it; see `status`, `drop`, `hang` and `cut`."""

    kind: Literal["status", "drop", "hang", "cut"]
    status: int = 503
    code: str = ""
    retry_after: float | None = None
    after: int = 0


def status(http: int, code: str = "internal_error", *, retry_after: float | None = None) -> Step:
    """Answer with this status and code; `retry_after` in seconds."""
    return Step("status", http, code, retry_after)


def drop() -> Step:
    """Close the connection without an answer."""
    return Step("drop")


def hang() -> Step:
    """Never answer."""
    return Step("hang")


def cut(after: int) -> Step:
    """Break a stream off after so many pieces."""
    return Step("cut", after=after)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that a node got. The names of its headers are in lower case."""

    node: str
    path: str
    body: Mapping[str, Any] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
