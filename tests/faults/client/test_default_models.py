"""What a fleet that disagrees means: by a model with two spaces, and by a call that names no model."""

import asyncio

import numpy as np
import pytest

from backend_client import (
    ClientOptions,
    ConfigurationError,
    NPUClient,
)
from backend_client.options import ProbeOptions
from tests.faults.scripted_node import EMBEDDER, vectors_for

TEXTS = [f"text {index}" for index in range(64 * 12)]


OFTEN = ClientOptions(probe=ProbeOptions(interval=0.05))


def answer_in_turn(first, second):
    """Let the first probe of one node wait until the client has read the report of the other: it asks that again."""
    read = asyncio.Event()

    async def at_once(_):
        if first.probes == 2:
            read.set()

    async def later(_):
        await read.wait()

    first.health_respond, second.health_respond = at_once, later


@pytest.mark.parametrize("first", [0, 1])
async def test_an_ambiguous_default_is_rejected_whichever_node_answers_first(pair, calls, first):
    """Each node has an embedding model of its own; the probe of the other waits until the first was answered."""
    pair[1].offer("embedding", "model-b", space="space-of-b")
    answer_in_turn(pair[first], pair[1 - first])
    with pytest.raises(ConfigurationError, match=rf"{EMBEDDER}, model-b"):
        await calls.many([node.url for node in pair], ["text"], options=OFTEN)
    assert not pair[0].requests
    assert not pair[1].requests


async def test_an_ambiguous_default_is_none_once_a_space_or_a_model_is_named(scripted, calls):
    scripted.offer("embedding", "model-b", space="space-of-b")
    assert (await calls.many([scripted.url], ["text"], model="model-b")).space == "space-of-b"
    assert (await calls.many([scripted.url], ["text"], spaces={"model-b": "space-of-b"})).space == "space-of-b"
    with pytest.raises(ConfigurationError, match="2 embedding models"):
        await calls.many([scripted.url], ["text"])


async def test_a_default_that_was_used_stays_when_the_fleet_gets_a_second_model(scripted):
    async with NPUClient([scripted.url]) as client:
        await client.embed("text")
        scripted.offer("embedding", "model-b", space="space-of-b")
        before = scripted.probes
        while scripted.probes < before + 2:
            await asyncio.sleep(0.05)
        np.testing.assert_array_equal(await client.embed_many(["text"]), vectors_for(["text"]))
        assert client.spaces == {EMBEDDER: "space-a"}


@pytest.mark.parametrize("first", [0, 1])
async def test_a_model_with_two_spaces_is_bound_to_the_same_whichever_node_answers_first(pair, calls, first):
    """As in the middle of an upgrade. Two processes of a service must not choose differently."""
    pair[0].space, pair[1].space = "space-b", "space-a"
    answer_in_turn(pair[first], pair[1 - first])
    result = await calls.many([node.url for node in pair], TEXTS[:300], model=EMBEDDER, options=OFTEN)
    assert result.space == "space-a"
    assert result.served == {pair[1].url: 300}


# The default model
