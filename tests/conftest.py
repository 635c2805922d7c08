"""Fixtures that every kind of test may use."""

import aiohttp
import pytest
from hypothesis import settings

from tests.support.nodes import start_node
from worker_node.models.store import ModelStore

# The same examples in every run: a suite that fails now and then is one that nobody believes. To look for new ones:
# pytest --hypothesis-profile=default
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")


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
