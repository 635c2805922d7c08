"""How every dialect answers: it parses a request into a `ParsedRequest`, and its `Renderer` writes the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from aiohttp import web

from worker_node.core.errors import NodeError
from worker_node.core.types import RequestContext
from worker_node.http.body import Body, note_effects, read_body
from worker_node.http.context import NODE, busy_of, request_context, route_headers
from worker_node.http.middleware import note_failure
from worker_node.http.replies import json_response
from worker_node.http.routes import EVENTS, JSON, ApiOperation, Model
from worker_node.http.sse import EventStream, LineStream
from worker_node.tasks.generate.blocks import Event, Finished, TokenLogprob
from worker_node.tasks.generate.request import GenerationRequest
from worker_node.tasks.generate.service import Choices, generate_choices


class Renderer(ABC):
    """Writes an answer in one dialect. The error of a stream is its last frame."""

    frames: ClassVar[type[EventStream | LineStream]] = EventStream

    def opening(self) -> bytes:
        """The frames before the first event."""
        return b""

    @abstractmethod
    def event(self, event: Event, choice: int, tokens: int, /) -> bytes:
        """The frames, if any, of a change of a block or of the end of a choice, which has made `tokens` so far."""

    @abstractmethod
    def failure(self, error: NodeError) -> bytes:
        """The frames of an error that comes after the status line."""

    @abstractmethod
    def whole(self, ends: Sequence[Finished]) -> dict[str, Any]:
        """The reply without a stream, of the ends of all choices."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What a request asks for, and who renders it. `kept` keeps the model in memory after it."""

    requests: Sequence[GenerationRequest]
    renderer: Callable[[Choices], Renderer]
    stream: bool
    kept: AbstractAsyncContextManager[None] = field(default_factory=nullcontext)


B = TypeVar("B", bound=Body)
Parse = Callable[[web.Request, RequestContext, B], Awaitable[ParsedRequest | web.StreamResponse]]


def generation_route(
    path: str, parse: Parse[B], summary: str, reply: Model, body: type[B], streamed: str = EVENTS
) -> ApiOperation:
    """A route that generates text. A request that asks for no text is answered by `parse`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        context = request_context(request)
        ask = await parse(request, context, await read_body(request, body))
        if isinstance(ask, web.StreamResponse):
            return ask
        services = request.app[NODE].services
        if ask.requests[0].ignored:
            note_effects(request, ask.requests[0].ignored)
        async with ask.kept, generate_choices(services, ask.requests, stream=ask.stream) as choices:
            prepared = choices.runs[0].prepared
            if prepared.ignored or prepared.limited:
                note_effects(request, prepared.ignored, prepared.limited)
            renderer = ask.renderer(choices)
            if not ask.stream:
                found = {index: end async for index, [end], _ in choices.events if isinstance(end, Finished)}
                ends = [found[index] for index in range(len(choices.runs))]
                headers = route_headers(choices.runs[0].execution.route, busy_of([end.busy for end in ends]))
                return json_response(renderer.whole(ends), headers=headers)
            async with renderer.frames(request, route_headers(choices.runs[0].execution.route)) as stream:
                try:
                    await stream.write(renderer.opening())
                    async for index, events, tokens in choices.events:
                        frames = b""
                        for event in events:
                            frames += renderer.event(event, index, tokens)
                        if frames:
                            choices.runs[index].execution.sent = True
                            await stream.write(frames)
                except NodeError as error:
                    note_failure(request, error)
                    await stream.write(renderer.failure(error))
            return stream.response

    replies = {JSON: reply, streamed: None}
    return ApiOperation("post", path, answer, summary, replies, body, inference=True)


# Log probabilities.


def known_alternatives(request: web.Request, name: str, wanted: int, temperature: float | None) -> int:
    """How many of the likeliest tokens are shown at each place, of those that the parameter `name` asks for.

    The engine reports the chosen token alone, which is the likeliest one without sampling.
    """
    known = 0 if temperature else 1
    if wanted > known:
        note_effects(request, limited={name: known})
    return min(wanted, known)


def chat_logprobs(tokens: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
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
