"""How long bodies may take to arrive, over sockets: within the caller's deadline, and not silent for long."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from tests.support.application import application
from worker_node.http import body
from worker_node.settings import NodeSettings

FORM = "multipart/form-data; boundary=X"


def head(path, content_type, *lines):
    common = ("Host: localhost", f"Content-Type: {content_type}", "Content-Length: 5000")
    return "\r\n".join((f"POST {path} HTTP/1.1", *common, *lines, "", "")).encode()


async def answer(client, begin, piece):
    """The status and error of a request whose body goes on with `piece` (None: with nothing) until there is a reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(begin)

    async def drip():
        while piece is not None:
            writer.write(piece)
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    try:
        async with asyncio.timeout(60):
            reply = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in reply.decode().splitlines() if line.startswith("Content-Length:"))
            body = json.loads(await reader.readexactly(length))
        return int(reply.split()[1]), body["error"]["code"]
    finally:
        dripping.cancel()
        writer.close()


CASES = pytest.mark.parametrize(
    ("path", "content_type", "begin"),
    [
        ("/v1/embeddings", "application/json", b'{"model":"x","input":"'),
        ("/v1/rerank", "application/json", b'{"query":"'),
        ("/v1/audio/transcriptions", FORM, b'--X\r\nContent-Disposition: form-data; name="file"\r\n\r\n'),
        ("/v1/audio/transcriptions", FORM, b'--X\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n'),
    ],
    ids=["embeddings", "rerank", "a file", "a field"],
)


@CASES
async def test_a_body_that_drips_in_ends_with_the_callers_deadline(path, content_type, begin):
    async with application() as (client, _):
        limit = "X-Request-Timeout-Ms: 300"
        sent = head(path, content_type, limit) + begin
        assert await answer(client, sent, b"a") == (504, "deadline_exceeded")


async def test_a_timer_that_ends_just_before_the_deadline_is_the_deadline_and_no_silence_of_the_sender(monkeypatch):
    stopped = time.monotonic()
    monkeypatch.setattr(body, "time", SimpleNamespace(monotonic=lambda: stopped))
    async with application() as (client, _):
        sent = head("/v1/embeddings", "application/json", "X-Request-Timeout-Ms: 100")
        assert await answer(client, sent, None) == (504, "deadline_exceeded")


@CASES
async def test_a_body_that_drips_in_ends_with_the_longest_time_of_a_request(path, content_type, begin):
    async with application(settings=NodeSettings(request_timeout_s=0.3)) as (client, _):
        assert await answer(client, head(path, content_type) + begin, b"a") == (504, "deadline_exceeded")


@CASES
async def test_a_body_that_falls_silent_is_a_408(path, content_type, begin):
    async with application(settings=NodeSettings(body_timeout_s=0.2)) as (client, _):
        assert await answer(client, head(path, content_type) + begin, None) == (408, "request_timeout")
