"""An actor and the node that it starts: one node, however often it is asked to make ready."""

import asyncio

import pytest

from backend_client.bulk import BulkRequest, ray_executor
from backend_client.bulk.ray_executor import Actor, TiedNode

REQUEST = BulkRequest(kind="embed", source="in", out="out", column="text")


@pytest.fixture
def started(monkeypatch):
    """The settings of the clients of nodes that were started, and what lets them be usable."""
    nodes, usable = [], asyncio.Event()

    async def wait(settings):
        nodes.append(settings)
        await usable.wait()

    monkeypatch.setattr(TiedNode, "start", lambda on_end: TiedNode("http://127.0.0.1:1", "own-key"))
    monkeypatch.setattr(ray_executor, "_until_usable", wait)
    return nodes, usable


async def test_a_driver_that_asks_again_while_the_node_starts_does_not_start_another(started):
    nodes, usable = started
    asked = Actor(REQUEST, (), start_node=True)
    calls = [asyncio.create_task(asked.ready(None)) for _ in range(3)]
    while not nodes:
        await asyncio.sleep(0)
    usable.set()
    assert len(set(await asyncio.gather(*calls))) == 1
    assert len(nodes) == 1


async def test_the_machines_keys_and_proxy_are_not_for_its_own_node(started, monkeypatch):
    nodes, usable = started
    usable.set()
    monkeypatch.setenv("NPU_CLIENT_API_KEY", "of-others")
    monkeypatch.setenv("NPU_CLIENT_NODES", "http://other:8081")
    monkeypatch.setenv("NPU_CLIENT_NODE_KEYS", '{"http://127.0.0.1:1": "of-others"}')
    monkeypatch.setenv("NPU_CLIENT_PROXY", "http://proxy:3128")
    await Actor(REQUEST, (), start_node=True).ready(None)
    (settings,) = nodes
    assert settings.nodes == ("http://127.0.0.1:1",)
    assert settings.api_key.get_secret_value() == "own-key"
    assert settings.node_keys["http://127.0.0.1:1"].get_secret_value() == "own-key"
    assert settings.proxy is None


async def test_a_node_that_is_not_usable_yet_is_waited_for_again_and_not_replaced(started, monkeypatch):
    starts = []
    monkeypatch.setattr(TiedNode, "start", lambda on_end: starts.append(on_end) or TiedNode("http://127.0.0.1:1", "k"))

    async def fail(settings):
        raise OSError("the probe failed")

    monkeypatch.setattr(ray_executor, "_until_usable", fail)
    asked = Actor(REQUEST, (), start_node=True)
    for _ in range(2):
        with pytest.raises(OSError, match="the probe failed"):
            await asked.ready(None)
    assert len(starts) == 1
