"""What the replies of OpenAI's generation routes have in common: ids, usage, the whole of a choice."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from worker_node.api.busy import busy_time
from worker_node.api.context import route_headers
from worker_node.core.types import Finished, Piece, Reasoning, Route, Token, TokenLogprob, ToolCallStarted
from worker_node.tasks.generate.serving.choices import Choices


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

    def head(self, kind: str) -> bytes:
        """The JSON of `wrap` up to the first choice: the same for all chunks of a stream; `]}` ends it."""
        return orjson.dumps(self.wrap(kind, []))[:-2]


@dataclass(slots=True)
class WholeAnswer:
    """A whole answer: its text, its reasoning, its tool calls as name and JSON arguments."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """One more piece has come."""
        if isinstance(piece, Token):
            self.text += piece.text
            self.logprobs += piece.logprobs
        elif isinstance(piece, Reasoning):
            self.reasoning += piece.text
        elif isinstance(piece, ToolCallStarted):
            self.calls.append((piece.name, ""))
        else:
            name, arguments = self.calls[piece.call]
            self.calls[piece.call] = (name, arguments + piece.text)


async def collect(choices: Choices) -> list[tuple[WholeAnswer, Finished]]:
    """Wait for all choices to finish."""
    outcomes = [WholeAnswer() for _ in choices.routes]
    ends: dict[int, Finished] = {}
    async for index, event in choices.events:
        if isinstance(event, Finished):
            ends[index] = event
        else:
            outcomes[index].add(event)
    return [(outcome, ends[index]) for index, outcome in enumerate(outcomes)]


def usage(finished: Sequence[Finished], choices_per_prompt: int) -> dict[str, int]:
    """Tokens in and out, of all choices in any order; a prompt counts once, however many choices continue it."""
    # As the engine counted them: before, those of images are an estimate.
    prompt = sum(end.usage.prompt_tokens for end in finished) // choices_per_prompt
    completion = sum(end.usage.completion_tokens for end in finished)
    return token_usage(prompt, completion)


def token_usage(prompt: int, completion: int) -> dict[str, int]:
    """Tokens in and out, as OpenAI writes them."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def json_response(body: dict[str, Any], route: Route, finished: Sequence[Finished]) -> web.Response:
    """The reply, with the headers that every inference has."""
    return web.Response(
        body=orjson.dumps(body),
        content_type="application/json",
        charset="utf-8",
        headers=route_headers(route, busy_time(finished), shared=any(end.npu_busy_shared for end in finished)),
    )
