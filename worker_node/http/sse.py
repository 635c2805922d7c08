"""Streamed replies: lines and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Self

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from worker_node.http.context import STATE


def line(data: Any) -> bytes:
    """A line with `data` as JSON."""
    return orjson.dumps(data) + b"\n"


def event_frame(data: Any, event: str | None = None) -> bytes:
    """A server-sent event with `data` as JSON."""
    head = f"event: {event}\ndata: ".encode() if event else b"data: "
    return head + orjson.dumps(data) + b"\n\n"


class FrameStream:
    """An open reply in frames. Use as `async with`.

    A client that reads nothing for long is dropped with its connection (`connection.GuardedConnection`).
    Where the form has comments, one after at most `keep_alive_s` of silence keeps proxies from closing the stream.
    """

    content_type: ClassVar[str]
    frame: ClassVar[Callable[..., bytes]]
    comment: ClassVar[bytes] = b""

    def __init__(self, request: web.Request, headers: dict[str, str], *, keep_alive_s: float = 15.0) -> None:
        more = {"Content-Type": self.content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._request = request
        # What the handler returns.
        self.response = web.StreamResponse(headers=headers | more)
        # Sends frames as they stand.
        self.write = self.response.write
        self._keep_alive_s = keep_alive_s
        self._comments: asyncio.Task[None] | None = None

    async def send(self, data: Any, *event: str) -> None:
        """Send one frame with `data` as JSON, under the name of an `event` where the form has them."""
        await self.write(self.frame(data, *event))

    async def __aenter__(self) -> Self:
        writer = await self.response.prepare(self._request)
        if writer is not None and self.comment:
            self._comments = asyncio.create_task(self._send_comments(writer), name="keep-alive comments")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._comments is not None:
            self._comments.cancel()
        if kind is None:
            # The reader has the whole answer; whether it waits for the end of the connection is its own affair.
            if (state := self._request.get(STATE)) is not None:
                state.complete = self.response.status
            await self.response.write_eof()

    async def _send_comments(self, writer: AbstractStreamWriter) -> None:
        """Send a comment whenever nothing was sent for half of the time."""
        with contextlib.suppress(ConnectionError):
            while True:
                sent = writer.output_size
                await asyncio.sleep(self._keep_alive_s / 2)
                if writer.output_size == sent:
                    await self.write(self.comment)


class LineStream(FrameStream):
    """An open `application/x-ndjson` reply: an object a line."""

    content_type = "application/x-ndjson"
    frame = staticmethod(line)


class EventStream(FrameStream):
    """An open `text/event-stream` reply."""

    content_type = "text/event-stream; charset=utf-8"
    comment = b": still here\n\n"
    frame = staticmethod(event_frame)
