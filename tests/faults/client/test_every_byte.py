"""A connection may break at any byte of a reply: the answer is right, or there is a typed error, and nothing else."""

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from backend_client import ClientOptions, NPUClient, StreamInterrupted
from backend_client.options import ProbeOptions
from tests.faults.proxy import Fault, FaultProxy
from tests.faults.scripted_node import ANSWER, vectors_for

TEXT = "The quick brown fox jumps over the lazy dog."
VECTOR = vectors_for([TEXT])[0].tolist()
# Of hundreds of first probes one may take long on a busy machine.
PATIENT = ClientOptions(probe=ProbeOptions(timeout=30))


@pytest.fixture
async def proxy(pair):
    async with FaultProxy(pair[0].url).running() as proxy:
        yield proxy


@pytest.fixture
def meeting(proxy, pair):
    """Makes clients of a node behind a proxy that suffers a fault.

    They get to know of a sound node only once the proxied one replies. So that is asked first, however slow a probe is.
    """

    @asynccontextmanager
    async def meet(fault):
        async with NPUClient([proxy.url], options=PATIENT) as client:
            proxy.fault = replace(fault, each=lambda _: client.fleet.runtime.add([pair[1].url]))
            yield client

    return meet


async def reply_length(proxy, call):
    async with NPUClient([proxy.url]) as client:
        seen = []
        proxy.fault = Fault(each=lambda data: seen.append(len(data)))
        await call(client)
    return sum(seen)


async def read(stream):
    """The pieces of a stream, and what interrupted it."""
    pieces = []
    try:
        while (piece := await anext(stream, None)) is not None:
            pieces.append(piece)
    except StreamInterrupted as error:
        return pieces, error
    return pieces, None


async def check_retried(client, proxy, sound):
    """The sound node answers what the other one failed to."""
    result = await client.embed_result(TEXT)
    assert result.vector == VECTOR
    *failed, last = result.attempts
    # The faulty node may be asked again while the first probe of the sound one is under way.
    assert {attempt.node for attempt in failed} == {proxy.url}
    assert {attempt.outcome for attempt in failed} <= {"ConnectionLost", "BadReply"}
    assert (last.node, last.outcome) == (sound.url, "ok")


@pytest.mark.parametrize("gently", [False, True], ids=["reset", "close"])
async def test_an_embedding_cut_at_any_byte_is_answered_by_the_other_node(proxy, pair, meeting, gently, long):
    # More than 5 s: dozens of calls, one for each place to cut at.
    length = await reply_length(proxy, lambda client: client.embed(TEXT))
    assert length > 200
    # The body has 32 bytes.
    for byte in sorted({*range(0, length, 1 if long else 7), *range(length - 37, length, 4), length - 33, length - 1}):
        async with meeting(Fault(cut_after=byte, gently=gently)) as client:
            await check_retried(client, proxy, pair[1])


async def test_a_stream_cut_at_any_byte_is_whole_retried_or_interrupted(proxy, meeting, long):
    # More than 5 s: dozens of streams, one for each place to cut at.
    length = await reply_length(proxy, lambda client: client.generate("prompt"))
    outcomes = set()
    for byte in [*range(0, length, 1 if long else 17), length + 50]:
        async with meeting(Fault(cut_after=byte)) as client:
            stream = client.stream("prompt")
            pieces, interrupted = await read(stream)
        assert pieces == ANSWER[: len(pieces)]
        if interrupted is not None:
            assert pieces
            assert interrupted.partial_text == "".join(pieces)
            outcomes.add("interrupted")
        else:
            assert stream.result.text == "".join(ANSWER) == "".join(pieces)
            outcomes.add("retried" if len(stream.result.attempts) > 1 else "whole")
    assert outcomes == {"interrupted", "retried", "whole"}


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
async def test_what_is_no_reply_of_a_node_is_retried_elsewhere(proxy, pair, meeting, name):
    async with meeting(SURPRISES[name]) as client:
        await check_retried(client, proxy, pair[1])
