"""A scripted server of images on loopback, and a fetcher that may ask it."""

import asyncio
import contextlib
import io
import time
from contextlib import asynccontextmanager

from PIL import Image

from worker_node.settings import NodeSettings
from worker_node.tasks.generate.http.remote_images import ImageFetcher

WHERE = "messages[0].content[1].image_url.url"


def _png():
    target = io.BytesIO()
    Image.new("RGB", (48, 40), "red").save(target, "PNG")
    return target.getvalue()


PNG = _png()


def reply(status="200 OK", body=PNG, **headers):
    head = {"Content-Type": "image/png", "Content-Length": str(len(body)), "Connection": "close"}
    head |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in head.items() if value is not None]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


class Server:
    """Answers every request on a port of 127.0.0.1 with `answer`: bytes, or a function that writes them itself."""

    def __init__(self):
        self.requests = []
        self.answer = reply()
        self.ended = asyncio.Event()
        self._serving = set()

    @asynccontextmanager
    async def running(self, tls=None):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._serving.add(asyncio.current_task())
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            if callable(self.answer):
                await self.answer(writer)
            else:
                writer.write(self.answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()
            self.ended.set()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def fetched(fetcher, url, *, most=10_000, seconds=60.0):
    return await fetcher.fetch(url, WHERE, most, time.monotonic() + seconds)


def allowing(*entries, **options):
    fetcher = ImageFetcher(**options)
    fetcher.follow(NodeSettings(allow_image_hosts=entries))
    return fetcher
