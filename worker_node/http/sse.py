"""Streamed replies to one reader, who may be slow or gone."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

from worker_node.core.errors import NodeError
from worker_node.http.leniency import STATE
from worker_node.http.middleware import note_failure

_COMMENT = b": still here\n\n"


class FrameStream:
    """An open reply in frames. Use as `async with`.

    A reader that takes nothing for `stall_s` is dropped: it would hold a place in the engine for nothing
    (ConnectionResetError).
    """

    def __init__(
        self, request: web.Request, headers: dict[str, str], content_type: str, *, stall_s: float = 30.0
    ) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={**headers, "Content-Type": content_type, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self._stall_s = stall_s
        self._wrote_at = 0.0
        self._blocked_since: float | None = None
        self._dropped = False
        self._stall_timer: asyncio.TimerHandle | None = None

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns."""
        return self._response

    def failed(self, error: NodeError) -> None:
        """Count an error that comes too late for the status line; the caller writes it as its dialect has it."""
        note_failure(self._request, error)

    async def __aenter__(self) -> Self:
        await self._response.prepare(self._request)
        loop = asyncio.get_running_loop()
        self._wrote_at = loop.time()
        self._stall_timer = loop.call_later(self._stall_s, self._look_at_reader)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                # Its reader has all that it waits for: whether it waits for the end of the connection, too, is its own.
                if (state := self._request.get(STATE)) is not None:
                    state.complete = self._response.status
                await self._response.write_eof()
        finally:
            if self._stall_timer is not None:
                self._stall_timer.cancel()

    async def _write(self, frame: bytes) -> None:
        self._wrote_at = self._blocked_since = asyncio.get_running_loop().time()
        try:
            await self._response.write(frame)
        except asyncio.CancelledError:
            if not self._dropped:
                raise
            # The end of the connection cancels its handler.
            raise ConnectionResetError("the reader of the stream takes nothing") from None
        finally:
            self._blocked_since = None

    def _look_at_reader(self) -> None:
        """Drop the reader if a write has waited for `stall_s`, else look again: one timer for all frames."""
        loop = asyncio.get_running_loop()
        due = (loop.time() if self._blocked_since is None else self._blocked_since) + self._stall_s
        if due > loop.time():
            self._stall_timer = loop.call_at(due, self._look_at_reader)
        elif self._request.transport is not None:
            self._dropped = True
            self._request.transport.abort()


class LineStream(FrameStream):
    """An open `application/x-ndjson` reply: an object a line."""

    def __init__(self, request: web.Request, headers: dict[str, str], *, stall_s: float = 30.0) -> None:
        super().__init__(request, headers, "application/x-ndjson", stall_s=stall_s)

    async def send(self, data: Any) -> None:
        """Send one line with `data` as JSON."""
        await self._write(orjson.dumps(data) + b"\n")


class EventStream(FrameStream):
    """An open `text/event-stream` reply.

    A comment frame every `keep_alive_s` of silence keeps proxies from closing the stream.
    """

    def __init__(
        self,
        request: web.Request,
        headers: dict[str, str],
        *,
        keep_alive_s: float = 15.0,
        stall_s: float = 30.0,
    ) -> None:
        super().__init__(request, headers, "text/event-stream; charset=utf-8", stall_s=stall_s)
        self._keep_alive_s = keep_alive_s
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._keeper = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        await super().__aexit__(kind, error, trace)

    async def send(self, data: Any, event: str | None = None) -> None:
        """Send one event with `data` as JSON."""
        head = f"event: {event}\ndata: ".encode() if event else b"data: "
        await self._write(head + orjson.dumps(data) + b"\n\n")

    async def send_raw(self, data: bytes) -> None:
        """Send one event whose data is text as it stands, without line breaks."""
        await self._write(b"data: " + data + b"\n\n")

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.1, self._wrote_at + self._keep_alive_s - loop.time()))
            # Behind a write that waits for the reader a comment would not arrive either.
            if self._blocked_since is None and loop.time() - self._wrote_at >= self._keep_alive_s:
                with contextlib.suppress(ConnectionError):
                    await self._write(_COMMENT)
