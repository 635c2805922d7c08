"""One result has one vector space, whatever nodes take a name for: differing aliases, reloads, restarts, the cloud."""

import asyncio

import numpy as np
import pytest

from backend_client import (
    ClientOptions,
    CloudClient,
    CloudSettings,
    ConfigurationError,
    InferenceClient,
    NPUClient,
    NPUUnavailableError,
)
from backend_client.errors import VectorSpaceMismatch
from backend_client.options import ProbeOptions
from tests.faults.scripted_node import EMBEDDER, vectors_for, vectors_in

TEXTS = [f"text {index}" for index in range(64 * 12)]
SPACES = {"model-a": "space-of-a", "model-b": "space-of-b"}


@pytest.fixture
async def nodes(pair):
    for node, name in zip(pair, SPACES, strict=True):
        for model, space in SPACES.items():
            node.offer("embedding", model, space=space)
        node.alias(prod=name)
    return pair


def assert_one_space(result, texts=TEXTS):
    assert result.space in SPACES.values()
    np.testing.assert_array_equal(result.vectors, vectors_in(result.space, texts))


async def test_a_space_bound_to_an_alias_decides_which_node_serves_it(nodes, embed_texts):
    for space in SPACES.values():
        result = await embed_texts([node.url for node in nodes], model="prod", spaces={"prod": space})
        assert result.space == space
        assert_one_space(result)
    with pytest.raises(VectorSpaceMismatch, match="vector space elsewhere"):
        await embed_texts([nodes[0].url], TEXTS[:10], model="prod", spaces={"model-a": "elsewhere"})


async def test_a_bound_model_is_not_bypassed_by_a_node_that_uses_its_name_as_an_alias(pair, embed_texts):
    impostor, honest = pair
    impostor.offer("embedding", "model-b", space="space-of-b")
    impostor.alias(**{"model-a": "model-b"})
    with pytest.raises(NPUUnavailableError):
        await embed_texts([impostor.url], TEXTS[:10], model="model-a", spaces={"model-a": "space-of-a"})
    honest.offer("embedding", "model-a", space="space-of-a")
    result = await embed_texts([impostor.url, honest.url], model="model-a", spaces={"model-a": "space-of-a"})
    assert result.space == "space-of-a"
    assert_one_space(result)


def change(node, alias, name, after):
    async def respond(_):
        if len(node.requests) >= after:
            node.alias(**{alias: name})

    node.respond = respond


async def test_a_reload_of_one_node_in_the_middle_leaves_its_rows_to_the_other(nodes, embed_texts):
    for node in nodes:
        node.alias(prod="model-a")
    change(nodes[1], "prod", "model-b", after=3)
    result = await embed_texts([node.url for node in nodes], model="prod")
    assert result.space == "space-of-a"
    assert_one_space(result)


async def test_two_calls_of_one_client_have_one_space(nodes):
    node = nodes[0]
    async with NPUClient([node.url]) as client:
        assert (await client.embed_result("text", model="prod")).space == "space-of-a"
        node.alias(prod="model-b")
        with pytest.raises(VectorSpaceMismatch):
            await client.embed("text", model="prod")
        # The model itself is as good as before.
        assert (await client.embed_result("text", model="model-a")).space == "space-of-a"
        node.alias(prod="model-a")
        before = node.probes
        while node.probes < before + 2:
            await asyncio.sleep(0.05)
        assert (await client.embed_result("text", model="prod")).space == "space-of-a"


def fallback(nodes, cloud, mapped, **more):
    settings = CloudSettings(base_url=cloud.url, api_key="sk", embedding_models=mapped)
    return InferenceClient(NPUClient([node.url for node in nodes], **more), CloudClient(settings))


async def test_the_cloud_continues_only_in_the_space_of_the_alias(nodes, cloud):
    """All nodes change what `prod` means; the cloud has a model for the space that it meant."""
    for node in nodes:
        node.alias(prod="model-a")
        change(node, "prod", "model-b", after=2)
    async with fallback(nodes, cloud, {"space-of-a": "cloud-a", "space-of-b": "cloud-b"}) as client:
        result = await client.embed_many_result(TEXTS, model="prod")
    assert result.space == "space-of-a"
    assert {body["model"] for body in cloud.bodies} == {"cloud-a"}
    assert cloud.url in result.served
    assert len(result.served) > 1


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
async def test_an_ambiguous_default_is_rejected_whichever_node_answers_first(pair, embed_texts, first):
    """Each node has an embedding model of its own; the probe of the other waits until the first was answered."""
    pair[1].offer("embedding", "model-b", space="space-of-b")
    answer_in_turn(pair[first], pair[1 - first])
    with pytest.raises(ConfigurationError, match=rf"{EMBEDDER}, model-b"):
        await embed_texts([node.url for node in pair], ["text"], options=OFTEN)
    assert not pair[0].requests
    assert not pair[1].requests


async def test_an_ambiguous_default_is_none_once_a_space_or_a_model_is_named(scripted, embed_texts):
    scripted.offer("embedding", "model-b", space="space-of-b")
    assert (await embed_texts([scripted.url], ["text"], model="model-b")).space == "space-of-b"
    assert (await embed_texts([scripted.url], ["text"], spaces={"model-b": "space-of-b"})).space == "space-of-b"
    with pytest.raises(ConfigurationError, match="2 embedding models"):
        await embed_texts([scripted.url], ["text"])


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
async def test_a_model_with_two_spaces_is_bound_to_the_same_whichever_node_answers_first(pair, embed_texts, first):
    """As in the middle of an upgrade. Two processes of a service must not choose differently."""
    pair[0].space, pair[1].space = "space-b", "space-a"
    answer_in_turn(pair[first], pair[1 - first])
    result = await embed_texts([node.url for node in pair], TEXTS[:300], model=EMBEDDER, options=OFTEN)
    assert result.space == "space-a"
    assert result.served == {pair[1].url: 300}
