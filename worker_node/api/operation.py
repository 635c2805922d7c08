"""A route as /openapi.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

Model = type[BaseModel]
# Content types of replies.
JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"
TEXT, HTML, BINARY = "text/plain", "text/html", "application/octet-stream"


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """A route: what it takes, what it gives. `replies` are by content type; None is text or bytes."""

    method: str
    path: str
    summary: str
    replies: Mapping[str, Model | None]
    body: Model | None = None
    inference: bool = False
    open: bool = False
    status: int = 200
