"""The caller blocks the event loop: what times out because of that is no fault of a node."""

import asyncio
import contextlib
import logging
import socket
import time

import pytest

from backend_client import ClientOptions, NPUClient
from backend_client.errors import NodeUnreachable
from backend_client.http.tls import Identity
from backend_client.http.transport import ConnectionWatch, HttpTransport
from backend_client.options import ProbeOptions, Timeouts

# Long enough that the event loop has turns within it on a busy machine.
CONNECT_S = 0.2
# No probe after the first, so that only requests judge the nodes.
NO_PROBES = ProbeOptions(interval=3600)


@pytest.mark.parametrize("kind", ["embed", "generate"])
async def test_connections_that_were_made_meanwhile_serve_all_calls(pair, kind, caplog):
    options = ClientOptions(timeouts=Timeouts(connect=CONNECT_S), probe=NO_PROBES)
    async with NPUClient([node.url for node in pair], options=options) as client:
        await client.health()
        calls = [asyncio.ensure_future(getattr(client, kind)("text")) for _ in range(20)]
        await asyncio.sleep(0)
        time.sleep(2 * CONNECT_S)  # noqa: ASYNC251  (the fault)
        assert all(await asyncio.gather(*calls))
        assert all(status.usable for status in client.status())
    assert "ejected" not in caplog.text


async def test_a_node_that_takes_no_connection_is_unreachable_all_the_same():
    transport = HttpTransport(Identity(), ClientOptions(timeouts=Timeouts(connect=CONNECT_S)))
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        # Fill its backlog, so that the kernel answers no further connection.
        for _ in range(4):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(deaf.getsockname())
        try:
            with pytest.raises(NodeUnreachable, match="no answer in time"):
                await asyncio.wait_for(transport.health(f"http://127.0.0.1:{deaf.getsockname()[1]}"), 30)
        finally:
            await transport.close()


async def test_a_loop_counts_as_blocked_until_a_timer_fires_in_time():
    watch = ConnectionWatch(CONNECT_S)
    watch.connecting()
    time.sleep(2 * CONNECT_S)  # noqa: ASYNC251  (the fault)
    assert watch.was_blocked
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert watch.was_blocked
    # Again until the machine lets the event loop run in time.
    while watch.was_blocked:
        watch.connecting()
        await asyncio.sleep(CONNECT_S)
    watch.ended()


async def test_late_timeouts_of_attempts_do_not_eject_a_model(scripted, caplog):
    caplog.set_level(logging.WARNING)
    options = ClientOptions(timeouts=Timeouts(attempt=CONNECT_S), probe=NO_PROBES)
    released = asyncio.Event()

    async def respond(_):
        await released.wait()

    async with NPUClient([scripted.url], options=options) as client:
        await client.embed("text")
        scripted.respond = respond
        calls = [asyncio.ensure_future(client.embed("text", timeout=30)) for _ in range(2)]
        while len(scripted.requests) < 1 + len(calls):
            await asyncio.sleep(0)
        released.set()
        # The replies come when the loop goes on, one turn after the timeouts.
        time.sleep(CONNECT_S + 0.2)  # noqa: ASYNC251  (the fault)
        assert all(await asyncio.gather(*calls))
    assert "ejected" not in caplog.text
