"""What the replies of OpenAI's generation routes have in common: ids, usage, the whole of a choice."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from worker_node.api.context import route_headers
from worker_node.domain import Finished, Route, Token
from worker_node.serving.choices import Choices


def new_id(prefix: str) -> str:
    """A fresh identifier: the prefix and 24 hex digits."""
    return f"{prefix}{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all chunks of a reply share: one id and one time for the whole of it."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object of that kind around the choices."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


@dataclass(slots=True)
class Outcome:
    """A finished choice: the pieces of its text, and how it ended."""

    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(token.text for token in self.tokens)


async def collect(choices: Choices) -> list[tuple[Outcome, Finished]]:
    """Wait for all choices to finish."""
    outcomes = [Outcome() for _ in choices.routes]
    async for index, event in choices.events:
        if isinstance(event, Token):
            outcomes[index].tokens.append(event)
        else:
            outcomes[index].finished = event
    return [(outcome, outcome.finished) for outcome in outcomes if outcome.finished is not None]


def usage(finished: Iterable[Finished], routes: Sequence[Route], choices_per_prompt: int) -> dict[str, int]:
    """Tokens in and out; a prompt counts once, however many choices continue it."""
    prompt = sum(route.token_count for route in routes[::choices_per_prompt])
    completion = sum(end.usage.completion_tokens for end in finished)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def busy_time(finished: Iterable[Finished]) -> int | None:
    """The NPU's busy time over all choices in microseconds, or None where none was measured."""
    deltas = [end.npu_busy_delta_us for end in finished if end.npu_busy_delta_us is not None]
    return sum(deltas) if deltas else None


def json_response(body: dict[str, Any], route: Route, busy_us: int | None) -> web.Response:
    """The reply, with the headers that every inference has."""
    return web.Response(
        body=orjson.dumps(body),
        content_type="application/json",
        charset="utf-8",
        headers=route_headers(route, busy_us),
    )
