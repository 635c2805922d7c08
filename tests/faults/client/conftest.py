"""Scripted nodes and a scripted cloud on loopback."""

import pytest

from backend_client import NPUClient
from backend_client.testing import FakeFleet
from tests.faults.scripted_node import ScriptedCloud, ScriptedNode


@pytest.fixture(scope="module")
def running():
    """Two nodes for all tests of a module; `fleet` clears them after each."""
    with FakeFleet(2) as fleet:
        yield fleet


@pytest.fixture
def fleet(running):
    yield running
    running.requests.clear()
    for node in running:
        node.clear()


@pytest.fixture
async def scripted():
    async with ScriptedNode().running() as node:
        yield node


@pytest.fixture
async def pair():
    async with ScriptedNode().running() as one, ScriptedNode().running() as two:
        yield [one, two]


@pytest.fixture
async def client(pair):
    async with NPUClient([node.url for node in pair]) as running:
        yield running


@pytest.fixture
async def cloud():
    async with ScriptedCloud().running() as running:
        yield running


TEXTS = [f"text {index}" for index in range(64 * 12)]


@pytest.fixture
def embed_texts():
    async def call(urls, texts=TEXTS, *, spaces=None, options=None, **more):
        async with NPUClient(urls, spaces=spaces, options=options) as client:
            return await client.embed_many_result(texts, **more)

    return call
