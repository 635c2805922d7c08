"""One stream with several readers, and closing it while one of them waits, in virtual time."""

import asyncio
import itertools

from tests.unit.backend_client.fakes import client_of, fleet, hang
from tests.unit.backend_client.virtual_time import in_virtual_time

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
