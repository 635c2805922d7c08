"""A connection may break at any byte of a reply: the answer is right, or there is a typed error, and nothing else.

Of a scripted node's replies every byte is tried; of a real node's some of each part, and with --long every byte up to
the body.
"""

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from backend_client import ClientOptions, NPUClient, StreamInterrupted
from backend_client.options import ProbeOptions
from tests.faults.proxy import Fault, FaultProxy

TEXT = "The quick brown fox jumps over the lazy dog."
PROMPT = "What is the capital of France?"
# Of hundreds of first probes one may take long on a busy machine.
PATIENT = ClientOptions(probe=ProbeOptions(timeout=30))


@dataclass(frozen=True)
class Pair:
    """A proxy before a node that will be asked first, the URL of a sound one that is asked second, and what is right.

    `head` is how many bytes from the first on are tried `dense` bytes apart, `step` how far apart those after them are;
    `stream_step` how far apart the cuts of a stream are.
    """

    proxy: FaultProxy
    sound: str
    vector: list
    answer: str
    head: int
    dense: int
    step: int
    stream_step: int

    def cuts(self, length, every=1):
        """Where to cut a reply of that many bytes: at every byte of its head that is tried, and in steps after it."""
        return [*range(0, min(self.head, length), every * self.dense), *range(self.head, length, every * self.step)]

    @asynccontextmanager
    async def client(self, fault):
        """A client that gets to know of the sound node only once the proxied one replies, which suffers the fault.

        So the proxied one is asked first, however slow a probe is.
        """
        async with NPUClient([self.proxy.url], options=PATIENT) as client:
            self.proxy.fault = replace(fault, each=lambda _: client.backend.runtime.add([self.sound]))
            yield client


@pytest.fixture(params=["scripted", pytest.param("real", marks=[pytest.mark.real, pytest.mark.timeout(300)])])
async def pair_of(request, pair, long):
    """Both kinds of pairs."""
    urls = [node.url for node in pair]
    head, dense, step, stream_step = 10**6, 1, 1, 7
    if request.param == "real":
        urls = [request.getfixturevalue("node").url] * 2
        head, dense, step, stream_step = (600, 1, 61, 37) if long else (600, 41, 500, 97)
    async with NPUClient(urls[1:]) as client:
        vector = await client.embed(TEXT)
        answer = (await client.generate(PROMPT, max_new_tokens=6)).text
    async with FaultProxy(urls[0]).running() as proxy:
        yield Pair(proxy, urls[1], vector, answer, head, dense, step, stream_step)


async def reply_length(proxy, call):
    """How long the proxied node's whole reply is."""
    async with NPUClient([proxy.url]) as client:
        seen = []
        proxy.fault = Fault(each=lambda data: seen.append(len(data)))
        await call(client)
        proxy.fault = Fault()
    return sum(seen)


@pytest.mark.parametrize("gently", [False, True], ids=["reset", "close"])
async def test_an_embedding_cut_at_every_byte_is_answered_by_the_other_node(pair_of, gently):
    # More than 5 s: hundreds of calls, one for each place to cut at.
    proxy = pair_of.proxy
    length = await reply_length(proxy, lambda client: client.embed(TEXT))
    assert length > 200
    cuts = pair_of.cuts(length, every=3 if gently else 1)
    for byte in cuts:
        async with pair_of.client(Fault(cut_after=byte, gently=gently)) as client:
            result = await client.embed_result(TEXT)
        assert result.vector == pair_of.vector, byte
        # The faulty node may be asked again while the first probe of the sound one is under way.
        *failed, last = result.attempts
        assert failed, byte
        assert {attempt.node for attempt in failed} == {proxy.url}, (byte, result.attempts)
        assert {attempt.outcome for attempt in failed} <= {"ConnectionLost", "BadReply"}, (byte, result.attempts)
        assert (last.node, last.outcome) == (pair_of.sound, "ok"), (byte, result.attempts)


async def test_a_stream_cut_at_every_byte_is_whole_retried_or_interrupted(pair_of):
    # More than 5 s: hundreds of streams, one for each place to cut at.
    proxy = pair_of.proxy
    length = await reply_length(proxy, read_all)
    outcomes = set()
    for byte in [*range(0, length, pair_of.stream_step), length + 50]:
        async with pair_of.client(Fault(cut_after=byte)) as client:
            stream = client.stream(PROMPT, max_new_tokens=6)
            pieces, interrupted = await read(stream)
        if interrupted is not None:
            assert pieces
            assert interrupted.partial_text == "".join(pieces)
            assert pair_of.answer.startswith(interrupted.partial_text)
            outcomes.add("interrupted")
        else:
            assert stream.result.text == pair_of.answer == "".join(pieces)
            outcomes.add("retried" if len(stream.result.attempts) > 1 else "whole")
    assert outcomes == {"interrupted", "retried", "whole"}


async def read_all(client):
    return [piece async for piece in client.stream(PROMPT, max_new_tokens=6)]


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


@pytest.mark.parametrize("pair_of", ["scripted"], indirect=True)  # the replies are the proxy's
@pytest.mark.parametrize("name", SURPRISES)
async def test_what_is_no_reply_of_a_node_is_retried_elsewhere(pair_of, name):
    proxy = pair_of.proxy
    async with pair_of.client(SURPRISES[name]) as client:
        result = await client.embed_result(TEXT)
    assert result.vector == pair_of.vector
    *failed, last = result.attempts
    assert {attempt.node for attempt in failed} == {proxy.url}
    assert {attempt.outcome for attempt in failed} <= {"BadReply", "ConnectionLost"}
    assert last.node == pair_of.sound
