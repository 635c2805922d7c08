"""What the replies of OpenAI's generation routes have in common: ids, usage, the whole of a choice."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import orjson
from aiohttp import web

from worker_node.core.errors import NodeError
from worker_node.core.types import Finished, Piece, Reasoning, Route, Token, TokenLogprob, ToolCallStarted
from worker_node.http.context import busy_fields, busy_time, route_headers
from worker_node.http.errors import describe_error
from worker_node.http.sse import EventStream
from worker_node.tasks.generate.service import Choices


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


# OpenAI's server-sent events: chunks of one envelope, the usage if asked for, `[DONE]`; or an error and the end.


class UsageOfChunks(Enum):
    """The usage in the chunks of a stream: none, the whole in the last chunk, or in each the tokens so far."""

    NONE = "none"
    AT_THE_END = "at_the_end"
    SO_FAR = "so_far"


class ChunkRenderer(Protocol):
    """How a dialect's chunks look: each method returns the `choices` of the chunks to send."""

    kind: str

    def opening(self, index: int) -> list[dict[str, Any]]: ...
    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]: ...
    def closing(self, index: int, finished: Finished) -> list[dict[str, Any]]: ...


async def stream_chunks(
    request: web.Request,
    choices: Choices,
    envelope: Envelope,
    renderer: ChunkRenderer,
    *,
    usage_of: UsageOfChunks,
    choices_per_prompt: int,
) -> web.StreamResponse:
    """Send the choices as they arise. A failure is the last event, and there is no `[DONE]` after it."""
    ends: list[Finished] = []
    async with EventStream(request, route_headers(choices.head())) as stream:
        chunks = _Chunks(stream, choices, envelope, renderer.kind, usage_of)
        try:
            for index in range(len(choices.routes)):
                for part in renderer.opening(index):
                    await chunks.send(part)
            async for index, event in choices.events:
                if not isinstance(event, Finished):
                    for part in renderer.piece(index, event):
                        await chunks.send(part)
                    continue
                ends.append(event)
                *parts, last = renderer.closing(index, event)
                for part in parts:
                    await chunks.send(part)
                complete = len(ends) == len(choices.routes)
                await chunks.send(last, busy_fields(ends) if complete and not chunks.with_usage else None)
            if chunks.with_usage:
                body = envelope.wrap(renderer.kind, [])
                body["usage"] = usage(ends, choices_per_prompt)
                await stream.send(body | busy_fields(ends))
            await stream.send_raw(b"[DONE]")
        except NodeError as error:
            stream.failed(error)
            await stream.send({"error": describe_error(error)})
    return stream.response


class _Chunks:
    """Sends the chunks of one reply, each with the usage that the caller asked for."""

    def __init__(
        self, stream: EventStream, choices: Choices, envelope: Envelope, kind: str, usage_of: UsageOfChunks
    ) -> None:
        self._stream = stream
        self._choices = choices
        self._envelope = envelope
        self._kind = kind
        self._so_far = usage_of is UsageOfChunks.SO_FAR
        self.with_usage = usage_of is not UsageOfChunks.NONE
        # Without usage, the JSON around the choice is the same in every chunk.
        self._head = envelope.head(kind)

    async def send(self, part: dict[str, Any], fields: dict[str, Any] | None = None) -> None:
        """Send a chunk with this choice, and with more `fields` beside the choices."""
        if not self.with_usage and not fields:
            await self._stream.send_raw(self._head + orjson.dumps(part) + b"]}")
            return
        body = self._envelope.wrap(self._kind, [part])
        if self._so_far:
            index = part["index"]
            body["usage"] = token_usage(self._choices.routes[index].token_count, self._choices.written[index])
        elif self.with_usage:
            body["usage"] = None
        await self._stream.send(body | (fields or {}))


# Log probabilities as OpenAI writes them.
#
# The engine tells the probability of the chosen token and of no other. The likeliest one is therefore known only
# where it
# is the one that was chosen: without sampling.


def known_alternatives(temperature: float | None) -> int:
    """How many of the likeliest tokens are known at each place."""
    return 0 if temperature else 1


def chat_logprobs(tokens: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    return {"content": [{**_entry(token), "top_logprobs": [_entry(token)] * top} for token in tokens], "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], top: int, offset: int = 0) -> dict[str, Any]:
    """The `logprobs` of a completion choice; `offset` is how many characters came before."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{token.text: token.logprob} for token in tokens] if top else None,
        "text_offset": offsets,
    }


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}
