"""Closing a client or a stream ends all that waits at once, with an error of the package, in virtual time."""

import asyncio
import itertools

import pytest

from backend_client import NPUClient, NPUError, StreamInterrupted
from backend_client.errors import ClientClosed
from tests.unit.backend_client.fakes import FakeTransport, client_of, fleet, hang
from tests.unit.backend_client.virtual_time import in_virtual_time, now


async def close_during(client, *calls):
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0.1)
    began = now()
    await client.close()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert now() - began < 0.01
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left
    return errors


@in_virtual_time
async def test_a_stream_in_the_middle_is_interrupted_with_what_it_had():
    [node] = nodes = fleet(1)
    node.pieces = ["Pa", hang]
    client = client_of(nodes)
    stream = client.stream("prompt")
    assert await anext(stream) == "Pa"
    [error] = await close_during(client, anext(stream))
    assert isinstance(error, StreamInterrupted)
    assert error.partial_text == "Pa"

    node.pieces = ["Pa", "ris"]
    client = client_of(nodes)
    stream = client.stream("prompt")
    assert await anext(stream) == "Pa"
    await client.close()
    with pytest.raises(NPUError):
        await anext(stream)


class SlowlyClosed(FakeTransport):
    async def close(self):
        await asyncio.sleep(0.1)
        await super().close()


@pytest.mark.parametrize("seconds", [0.0, 0.05])
@in_virtual_time
async def test_a_second_close_waits_for_the_first_whenever_that_is_left(seconds):
    nodes = fleet(2)
    for node in nodes:
        node.embed = hang
    transport = SlowlyClosed(nodes)
    client = NPUClient([node.url for node in nodes], transport=lambda: transport, clock=now)
    call = asyncio.ensure_future(client.embed("text"))
    await asyncio.sleep(0.1)
    left = asyncio.ensure_future(client.close())
    await asyncio.sleep(seconds)
    left.cancel()
    await client.close()
    assert transport.closed
    await asyncio.gather(left, return_exceptions=True)
    with pytest.raises(ClientClosed):
        await call
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_a_cancelled_call_is_cancelled_also_when_the_client_closes():
    nodes = fleet(1)
    nodes[0].embed = hang
    client = client_of(nodes)
    task = asyncio.ensure_future(client.embed("text"))
    await asyncio.sleep(0.1)
    task.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await task


PIECES = [f"piece {index} " for index in range(9)]


async def read(stream, into):
    async for piece in stream:
        into.append(piece)
        await asyncio.sleep(0)
    return "ended"


@in_virtual_time
async def test_each_piece_goes_to_one_of_several_readers():
    nodes = fleet(1)
    nodes[0].pieces = PIECES
    async with client_of(nodes) as client:
        stream = client.stream("prompt")
        parts = [[], [], []]
        assert await asyncio.gather(*(read(stream, part) for part in parts)) == ["ended"] * 3
        assert sorted(itertools.chain(*parts)) == sorted(PIECES)
        assert all(part == sorted(part) and part for part in parts)
        assert stream.result.text == "".join(PIECES)


@in_virtual_time
async def test_closing_a_stream_ends_the_iteration_of_its_readers():
    nodes = fleet(1)
    nodes[0].pieces = ["first ", hang]
    async with client_of(nodes) as client:
        stream = client.stream("prompt")
        parts = [[], []]
        readers = [asyncio.create_task(read(stream, part)) for part in parts]
        await asyncio.sleep(1)
        await asyncio.gather(stream.aclose(), stream.aclose())
        assert await asyncio.gather(*readers) == ["ended"] * 2
        assert [*itertools.chain(*parts)] == ["first "]
        assert stream.result is None
        assert [reader.cancelling() for reader in readers] == [0, 0]
        assert client.status()[0].in_flight == 0
