"""OpenAI's server-sent events: chunks of one envelope, the usage if asked for, `[DONE]`; or an error and the end."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

import orjson
from aiohttp import web

from worker_node.api.busy import busy_fields
from worker_node.api.context import route_headers
from worker_node.api.openai.errors import describe_error
from worker_node.api.sse import EventStream
from worker_node.core.errors import NodeError
from worker_node.core.types import Finished, Piece
from worker_node.tasks.generate.api.openai.reply import Envelope, token_usage, usage
from worker_node.tasks.generate.serving.choices import Choices


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
