"""Many slow calls on one healthy node, over real sockets."""

import asyncio

from backend_client import ClientOptions, NPUClient
from backend_client.options import ProbeOptions


async def test_probes_do_not_wait_behind_calls(scripted):
    """300 calls use all 128 connections for many probe periods; every one of them is answered."""
    release = asyncio.Event()

    async def wait(_request):
        await release.wait()

    scripted.respond = wait
    options = ClientOptions(probe=ProbeOptions(interval=0.02, timeout=10, retry_interval=0.01))
    async with NPUClient([scripted.url], options=options) as client:
        await client.health()
        calls = [asyncio.create_task(client.generate("prompt")) for _ in range(300)]
        while len(scripted.requests) < options.connections_per_node:
            await asyncio.sleep(0.01)
        probes = scripted.probes
        while scripted.probes < probes + 20:
            await asyncio.sleep(0.01)
        assert client.status()[0].usable
        assert client.status()[0].in_flight == 300
        release.set()
        assert {result.finish_reason for result in await asyncio.gather(*calls)} == {"stop"}
