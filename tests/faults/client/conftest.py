"""Scripted nodes and a scripted cloud on loopback."""

import pytest

from tests.faults.scripted_node import ScriptedCloud, ScriptedNode


@pytest.fixture
async def scripted():
    """One scripted node."""
    async with ScriptedNode().running() as node:
        yield node


@pytest.fixture
async def pair():
    """Two scripted nodes."""
    async with ScriptedNode().running() as one, ScriptedNode().running() as two:
        yield [one, two]


@pytest.fixture
async def cloud():
    """A scripted OpenAI-compatible API."""
    async with ScriptedCloud().running() as running:
        yield running
