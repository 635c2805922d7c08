"""Connections of an HTTP client that end when a server sends more framing than content.

A server may send any number of interim replies (103) before its own, and each byte of a body in a chunk of its own,
with as long a comment (a chunk extension) as it likes. A few megabytes of them take the event loop, which parses them,
for seconds.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

# Lines of heads, and of chunks of 256 bytes and more; in an image there is a line's end in 64 KB.
_LINES = 1000
_BYTES_A_LINE = 128
# Beside the content: a twentieth for its chunks, and heads.
_FRAMING_SHARE, _FRAMING_BYTES = 20, 1 << 18


class TooMuchFraming(aiohttp.ClientPayloadError):
    """The server sent more heads and chunks than an image needs."""


class _BoundedReply(ResponseHandler):
    """Looks at what arrives before it is parsed: counting is a hundred times cheaper."""

    __slots__ = ("_arrived", "_lines", "_most")

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        super().__init__(loop)
        self._most = most + most // _FRAMING_SHARE + _FRAMING_BYTES
        self._arrived = self._lines = 0

    def data_received(self, data: bytes) -> None:
        self._arrived += len(data)
        self._lines += data.count(b"\n")
        if self._lines > _LINES + self._arrived // _BYTES_A_LINE or self._arrived > self._most:
            self.set_exception(TooMuchFraming("more heads and chunks than an image needs"))
            if self.transport is not None:
                self.transport.abort()
            return
        super().data_received(data)


class BoundedConnector(aiohttp.TCPConnector):
    """A connector with such connections, for content of at most `most` bytes."""

    def __init__(self, most: int, **options: Any) -> None:
        super().__init__(**options)
        # aiohttp has no public way to give connections a protocol of one's own.
        self._factory = partial(_BoundedReply, asyncio.get_running_loop(), most)  # type: ignore[assignment]
