"""Replies of OpenAI's chat and completion routes: ids, usage, log probabilities; whole or as server-sent events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from aiohttp import web

from worker_node.core.errors import NodeError
from worker_node.core.types import Finished, Piece, Reasoning, Route, Token, TokenLogprob, ToolCallStarted
from worker_node.http.context import busy_fields, busy_time, route_headers
from worker_node.http.errors import describe_error
from worker_node.http.sse import EventStream
from worker_node.tasks.generate.http.fields import StreamOptions
from worker_node.tasks.generate.service import Choices


class Form(Protocol):
    """How a route writes choices. `opening`, `piece` and `closing` return the `choices` of the chunks of a stream."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def opening(self, index: int) -> list[dict[str, Any]]: ...
    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]: ...
    def closing(self, index: int, finished: Finished) -> dict[str, Any]: ...
    def whole(self, index: int, answer: WholeAnswer, finished: Finished) -> dict[str, Any]: ...


async def send_whole(choices: Choices, form: Form, *, choices_per_prompt: int) -> web.Response:
    """Wait for all choices, and send them as one reply."""
    answers = [WholeAnswer() for _ in choices.runs]
    ends: dict[int, Finished] = {}
    async for index, event, _ in choices.events:
        if isinstance(event, Finished):
            ends[index] = event
        else:
            answers[index].add(event)
    finished = [ends[index] for index in range(len(answers))]
    route = choices.routes[0]
    body = Envelope(new_id(form.id_prefix), route.model).wrap(
        form.kind, [form.whole(index, answer, ends[index]) for index, answer in enumerate(answers)]
    )
    body["usage"] = _usage(finished, choices_per_prompt)
    return json_response(body, route, finished)


async def stream_chunks(
    request: web.Request, choices: Choices, form: Form, options: StreamOptions, *, choices_per_prompt: int
) -> web.StreamResponse:
    """Send the choices as they arise. A failure is the last event, and there is no `[DONE]` after it."""
    envelope = Envelope(new_id(form.id_prefix), choices.routes[0].model)
    # Without usage the JSON around the choice is the same in every chunk.
    head = orjson.dumps(envelope.wrap(form.chunk_kind, []))[:-2]
    with_usage = bool(options.include_usage)
    ends: list[Finished] = []
    async with EventStream(request, route_headers(choices.head())) as stream:

        async def send(part: dict[str, Any], tokens: int, busy: dict[str, Any] | None = None) -> None:
            if not with_usage and not busy:
                await stream.send_raw(head + orjson.dumps(part) + b"]}")
                return
            body = envelope.wrap(form.chunk_kind, [part])
            if with_usage:
                prompt = choices.routes[part["index"]].token_count
                body["usage"] = _token_usage(prompt, tokens) if options.continuous_usage_stats else None
            await stream.send(body | (busy or {}))

        try:
            for index in range(len(choices.runs)):
                for part in form.opening(index):
                    await send(part, 0)
            async for index, event, tokens in choices.events:
                if isinstance(event, Finished):
                    ends.append(event)
                    complete = len(ends) == len(choices.runs)
                    busy = busy_fields(ends) if complete and not with_usage else None
                    await send(form.closing(index, event), tokens, busy)
                else:
                    for part in form.piece(index, event):
                        await send(part, tokens)
            if with_usage:
                body = envelope.wrap(form.chunk_kind, [])
                body["usage"] = _usage(ends, choices_per_prompt)
                await stream.send(body | busy_fields(ends))
            await stream.send_raw(b"[DONE]")
        except NodeError as error:
            stream.failed(error)
            await stream.send({"error": describe_error(error)})
    return stream.response


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


def _usage(finished: Sequence[Finished], choices_per_prompt: int) -> dict[str, int]:
    """Tokens in and out, of all choices in any order; a prompt counts once, however many choices continue it."""
    # As the engine counted them: before, those of images are an estimate.
    prompt = sum(end.usage.prompt_tokens for end in finished) // choices_per_prompt
    completion = sum(end.usage.completion_tokens for end in finished)
    return _token_usage(prompt, completion)


def _token_usage(prompt: int, completion: int) -> dict[str, int]:
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


# Log probabilities. The engine reports the probability of the chosen token and of no other, so the likeliest token is
# known only where it is the chosen one: without sampling.


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
