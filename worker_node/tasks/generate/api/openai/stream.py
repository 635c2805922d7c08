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
from worker_node.domain import Finished, Piece
from worker_node.errors import NodeError
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
    include_usage = usage_of is not UsageOfChunks.NONE

    def chunk(part: dict[str, Any]) -> dict[str, Any]:
        body = envelope.wrap(renderer.kind, [part])
        if usage_of is UsageOfChunks.SO_FAR:
            index = part["index"]
            body["usage"] = token_usage(choices.routes[index].token_count, choices.written[index])
        elif include_usage:
            body["usage"] = None
        return body

    # What most chunks have around their choice.
    head = envelope.head(renderer.kind)

    async def send(stream: EventStream, part: dict[str, Any]) -> None:
        if include_usage:
            await stream.send(chunk(part))
        else:
            await stream.send_raw(head + orjson.dumps(part) + b"]}")

    async with EventStream(request, route_headers(choices.head())) as stream:
        try:
            for index in range(len(choices.routes)):
                for part in renderer.opening(index):
                    await send(stream, part)
            async for index, event in choices.events:
                if not isinstance(event, Finished):
                    for part in renderer.piece(index, event):
                        await send(stream, part)
                    continue
                ends.append(event)
                *parts, last = [chunk(part) for part in renderer.closing(index, event)]
                for body in parts:
                    await stream.send(body)
                if len(ends) == len(choices.routes) and not include_usage:
                    last |= busy_fields(ends)
                await stream.send(last)
            if include_usage:
                body = envelope.wrap(renderer.kind, [])
                body["usage"] = usage(ends, choices_per_prompt)
                await stream.send(body | busy_fields(ends))
            await stream.send_raw(b"[DONE]")
        except NodeError as error:
            stream.failed(error)
            await stream.send({"error": describe_error(error)})
    return stream.response
