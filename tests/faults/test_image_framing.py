"""Servers of images that send more framing than content, or content without end: the connection ends at a bound."""

import asyncio

import pytest

from tests.support.image_server import Server, allowing, fetched
from worker_node.core.errors import BadRequest, PayloadTooLarge
from worker_node.tasks.generate.http.remote_images import FetchLimits


@pytest.fixture
async def server():
    async with Server().running() as running:
        yield running


async def test_an_endless_image_ends_at_the_bound(server):
    sent = 0

    async def endless(writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
        while True:
            writer.write(bytes(10_000))
            sent += 10_000
            await writer.drain()

    server.answer = endless
    fetcher = allowing(f"http://127.0.0.1:{server.port}")
    with pytest.raises(PayloadTooLarge):
        await fetched(fetcher, f"http://127.0.0.1:{server.port}/", most=1_000_000)
    await asyncio.wait_for(server.ended.wait(), 60)
    # What the kernel's buffers hold was sent, too.
    assert sent < 50_000_000


class Flood:
    """An answer that goes on with the same few bytes until the other side has enough, or `MOST` were sent."""

    MOST = 24_000_000

    def __init__(self, head, piece):
        self._head, self._piece, self.sent = head, piece, 0

    async def __call__(self, writer):
        writer.write(self._head)
        while self.sent < self.MOST:
            writer.write(self._piece * 10_000)
            self.sent += 10_000 * len(self._piece)
            await writer.drain()


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
        (b"", b"HTTP/1.1 103\n\n"),
        (CHUNKED, b"1\r\n\x89\r\n"),
        (CHUNKED, b"1;" + b"a" * 1000 + b"\r\n\x89\r\n"),
    ],
    ids=["interim replies", "with bare line feeds", "chunks of a byte", "chunks with comments"],
)
async def test_framing_without_content_ends_the_connection(server, head, piece):
    """Parsing it would hold the event loop; nothing else ends it before the image's 10 s are over."""
    server.answer = flood = Flood(head, piece)
    fetcher = allowing(f"http://127.0.0.1:{server.port}", limits=FetchLimits(timeout_s=3600))
    with pytest.raises(BadRequest, match="cannot be fetched"):
        await fetched(fetcher, f"http://127.0.0.1:{server.port}/", most=1 << 20, seconds=3600)
    await server.ended.wait()
    # What the kernel's buffers hold was sent, too.
    assert flood.sent < flood.MOST, "it was read to its end"


async def test_an_image_in_usual_chunks_arrives(server):
    body = b"".join(b"200\r\n" + bytes([number % 256]) * 512 + b"\r\n" for number in range(4000)) + b"0\r\n\r\n"
    server.answer = CHUNKED + body
    fetcher = allowing(f"http://127.0.0.1:{server.port}")
    assert len(await fetched(fetcher, f"http://127.0.0.1:{server.port}/", most=1 << 22)) == 4000 * 512
