"""Connections that are closed in one direction. Streams whose engine dies: tests/real/test_dashboard.py."""

import asyncio

import pytest

from tests.faults.dialects.streams import ROUTES, at_rest, connect, raw_request

pytestmark = pytest.mark.real


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_half_closed_connection_is_answered_or_dropped(http, node, route, stream):
    reader, writer = await connect(node)
    writer.write(raw_request(route, stream=stream, tokens=4))
    writer.write_eof()
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 200")
    await at_rest(http, node)
