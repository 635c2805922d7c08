"""A node whose engine writes a scripted text: its client, its `Node` and that engine."""

import pytest

from tests.support.writing import writing


@pytest.fixture
async def written(store):
    async with writing(store) as served:
        yield served


@pytest.fixture
def client(written):
    return written[0]


@pytest.fixture
def node(written):
    return written[1]


@pytest.fixture
def engine(written):
    return written[2]
