"""A connection may break at any byte of a reply: the answer is right, or there is a typed error, and nothing else."""

import numpy as np
import pytest

from backend_client import NPUClient, StreamInterrupted
from tests.faults.proxy import Fault, FaultProxy
from tests.faults.scripted_node import ANSWER, vectors_for


@pytest.fixture
async def cut_then_whole(pair):
    """The URL of a node behind a proxy that will cut, and of a sound one that is asked second."""
    async with FaultProxy(pair[0].url).running() as proxy:
        yield proxy, pair[1]


async def reply_length(proxy, call):
    """How long the proxied node's whole reply is."""
    async with NPUClient([proxy.url]) as client:
        seen = []
        proxy.fault = Fault(rewrite=lambda data: seen.append(len(data)) or data)
        await call(client)
        proxy.fault = Fault()
    return sum(seen)


@pytest.mark.parametrize("gently", [False, True], ids=["reset", "close"])
async def test_an_embedding_cut_at_every_byte_is_answered_by_the_other_node(cut_then_whole, gently):
    proxy, sound = cut_then_whole
    length = await reply_length(proxy, lambda client: client.embed("text"))
    assert length > 200
    expected = vectors_for(["text"])[0].tolist()
    retried = 0
    cuts = range(0, length, 3) if gently else range(length)
    for byte in cuts:
        proxy.fault = Fault(cut_after=byte, gently=gently)
        async with NPUClient([proxy.url]) as client:
            await client.health()
            # The sound node comes second by being unknown when the first is asked.
            client.backend.runtime.add([sound.url])
            result = await client.embed_result("text")
        assert np.float32(result.vector).tolist() == expected, byte
        assert result.attempts[-1].outcome == "ok"
        retried += result.attempts[0].outcome in {"ConnectionLost", "BadReply"}
    assert retried == len(cuts)


async def test_a_stream_cut_at_every_byte_is_whole_retried_or_interrupted(cut_then_whole):
    proxy, sound = cut_then_whole
    whole = "".join(ANSWER)
    outcomes = set()
    for byte in range(0, 1400, 7):
        proxy.fault = Fault(cut_after=byte)
        async with NPUClient([proxy.url]) as client:
            await client.health()
            client.backend.runtime.add([sound.url])
            stream = client.stream("prompt")
            pieces, interrupted = await read(stream)
        if interrupted is not None:
            assert pieces
            assert interrupted.partial_text == "".join(pieces)
            assert whole.startswith(interrupted.partial_text)
            outcomes.add("interrupted")
        else:
            assert stream.result.text == whole == "".join(pieces)
            outcomes.add("retried" if len(stream.result.attempts) > 1 else "whole")
    assert outcomes == {"interrupted", "retried", "whole"}


async def read(stream):
    """The pieces of a stream, and what interrupted it."""
    pieces = []
    try:
        while (piece := await anext(stream, None)) is not None:
            pieces.append(piece)
    except StreamInterrupted as error:
        return pieces, error
    return pieces, None


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nX-Shape: 1,8\r\nX-Space: space-a\r\n"
SURPRISES = {
    "garbage": Fault(instead=bytes(range(256)) * 8),
    "nothing": Fault(instead=b""),
    "half a status line": Fault(instead=b"HTTP/1.1 2"),
    "a redirect": Fault(instead=b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
    "switching protocols": Fault(
        instead=b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"
    ),
    "too short a body": Fault(instead=HEAD + b"Content-Length: 16\r\n\r\n" + b"\0" * 16),
    "too long a body": Fault(instead=HEAD + b"Content-Length: 64\r\n\r\n" + b"\0" * 64),
    "a length that promises more": Fault(instead=HEAD + b"Content-Length: 9999\r\n\r\n" + b"\0" * 32),
    "a length that is none": Fault(instead=HEAD + b"Content-Length: -5\r\n\r\n" + b"\0" * 32),
    "a length beyond reason": Fault(instead=HEAD + b"Content-Length: 99999999999\r\n\r\n" + b"\0" * 100_000),
    "not a number": Fault(instead=HEAD + b"Content-Length: 32\r\n\r\n" + b"\xff" * 32),
    "a header without end": Fault(instead=b"HTTP/1.1 200 OK\r\nX-Shape: " + b"1" * 100_000),
    "text": Fault(instead=b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<ok>"),
    "a bad chunk": Fault(instead=HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
}


@pytest.mark.parametrize("name", SURPRISES)
async def test_what_is_no_reply_of_a_node_is_retried_elsewhere(cut_then_whole, name):
    proxy, sound = cut_then_whole
    proxy.fault = SURPRISES[name]
    async with NPUClient([proxy.url]) as client:
        await client.health()
        client.backend.runtime.add([sound.url])
        result = await client.embed_result("text")
    assert np.float32(result.vector).tolist() == vectors_for(["text"])[0].tolist()
    assert [attempt.node for attempt in result.attempts] == [proxy.url, sound.url]
    assert result.attempts[0].outcome in {"BadReply", "ConnectionLost"}


async def test_early_hints_and_slow_closes_are_no_faults(cut_then_whole):
    proxy, _ = cut_then_whole
    proxy.fault = Fault(before=b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", close_after=5.0, bandwidth=50_000)
    async with NPUClient([proxy.url]) as client:
        for _ in range(3):
            assert (await client.embed_result("text")).attempts[0].outcome == "ok"
        assert client.status()[0].usable
