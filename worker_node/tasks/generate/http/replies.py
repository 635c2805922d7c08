"""How every dialect answers: it parses a request into an `Ask` and renders the events of the answer.

`answering` makes the handler of a route from a dialect's parser; a dialect's `Renderer` writes an answer, whole or as
frames of a stream. Below them are whole answers and log probabilities, as several dialects write them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from aiohttp import web

from worker_node.core.errors import NodeError
from worker_node.core.types import Finished, FinishReason, Piece, Reasoning, Token, TokenLogprob, ToolCallStarted
from worker_node.http.context import busy_of, route_headers
from worker_node.http.replies import json_response
from worker_node.http.request_state import NODE
from worker_node.http.sse import EventStream, LineStream
from worker_node.http.task import Handler
from worker_node.tasks.generate.model import GenerationRequest
from worker_node.tasks.generate.service import ChoiceEvent, Choices, generate_choices


class Renderer(ABC):
    """Writes an answer in one dialect. A stream is made of frames; its error is its last frame, and says so."""

    frames: ClassVar[type[EventStream | LineStream]] = EventStream

    def opening(self) -> bytes:
        """The frames before the first event."""
        return b""

    @abstractmethod
    def event(self, event: ChoiceEvent) -> bytes:
        """The frames of a piece, or of the end of a choice; there may be none."""

    @abstractmethod
    def failure(self, error: NodeError) -> bytes:
        """The frames of an error that comes after the status line."""

    @abstractmethod
    def whole(self, events: Sequence[ChoiceEvent]) -> dict[str, Any]:
        """The reply without a stream."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for, and who renders the answer. `kept` has the model kept in memory after it."""

    requests: Sequence[GenerationRequest]
    renderer: Callable[[Choices], Renderer]
    stream: bool
    kept: AbstractAsyncContextManager[None] = field(default_factory=nullcontext)


def answering(parse: Callable[[web.Request], Awaitable[Ask | web.StreamResponse]]) -> Handler:
    """The handler of a route that generates text. A request that asks for no text is answered by `parse`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        ask = await parse(request)
        if isinstance(ask, web.StreamResponse):
            return ask
        services = request.app[NODE].services
        async with ask.kept, generate_choices(services, ask.requests, whole=not ask.stream) as choices:
            renderer = ask.renderer(choices)
            if not ask.stream:
                events = [event async for event in choices.events]
                finished = [event.event for event in events if isinstance(event.event, Finished)]
                headers = route_headers(choices.routes[0], busy_of(finished))
                return json_response(renderer.whole(events), headers=headers)
            async with renderer.frames(request, route_headers(choices.head())) as stream:
                try:
                    await stream.write(renderer.opening())
                    async for event in choices.events:
                        if frames := renderer.event(event):
                            await stream.write(frames)
                except NodeError as error:
                    stream.failed(error)
                    await stream.write(renderer.failure(error))
            return stream.response

    return answer


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

    def drop_half_call(self) -> None:
        """Leave out the last call if its arguments are not complete."""
        try:
            orjson.loads(self.calls[-1][1] if self.calls else "{}")
        except orjson.JSONDecodeError:
            self.calls.pop()


def whole_answers(events: Sequence[ChoiceEvent], count: int) -> tuple[list[WholeAnswer], list[Finished]]:
    """The answers of all choices and their ends, in the order of the choices.

    A call that the length of the answer cut is left out: nobody could run it.
    """
    answers, ends = [WholeAnswer() for _ in range(count)], dict[int, Finished]()
    for index, event, _ in events:
        if isinstance(event, Finished):
            ends[index] = event
            if event.finish_reason is FinishReason.LENGTH:
                answers[index].drop_half_call()
        else:
            answers[index].add(event)
    return answers, [ends[index] for index in range(count)]


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
