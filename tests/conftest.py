"""Fixtures that every kind of test may use."""

import aiohttp
import pytest

from tests.support.nodes import start_node
from worker_node.models.store import ModelStore


@pytest.fixture(scope="session")
def store():
    """The model store with the embedded models in it; a test run downloads nothing when they are there."""
    store = ModelStore()
    for entry in store.catalog.embedded():
        store.pull(entry.id)
    return store


@pytest.fixture(scope="session")
def node(store):
    """A real node with real models, shared by all tests that leave it as they found it."""
    with start_node() as running:
        yield running


@pytest.fixture
async def http():
    """An HTTP client."""
    async with aiohttp.ClientSession() as session:
        yield session
