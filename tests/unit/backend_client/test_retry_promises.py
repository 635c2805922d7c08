"""The promises of the client about retries, deadlines, streams and vector spaces, in virtual time."""

import asyncio

import pytest

from backend_client import ClientOptions, NPUUnavailableError, StreamInterrupted
from backend_client.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ModelNotFound,
    NodeFailed,
    NodeOverloaded,
    NodeUnreachable,
    VectorSpaceMismatch,
)
from tests.unit.backend_client.fakes import FakeNode, client_of, fleet, hang, report, warm
from tests.unit.backend_client.test_promises import load, now
from tests.unit.backend_client.virtual_time import in_virtual_time


@in_virtual_time
async def test_5_retries_stay_within_a_tenth_of_the_calls_and_one_a_second():
    nodes = fleet(3)
    async with warm(nodes) as client:
        for node in nodes:
            node.embed = NodeFailed("boom", node=node.url, status=500)
        began = now()
        errors = await load(client, every=0.005, seconds=10)
        sent = sum(len(node.requests) for node in nodes)
        calls = len(errors)
        assert calls >= 2000
        first_tries = sum(bool(error.attempts) for error in errors)
        assert sent - first_tries <= 2 + 0.1 * calls + (now() - began)


@in_virtual_time
async def test_5_at_most_three_attempts_and_never_twice_the_same_node_while_another_is_alive():
    nodes = fleet(5)
    async with warm(nodes) as client:
        for node in nodes:
            node.embed = NodeFailed("boom", node=node.url, status=500)
        with pytest.raises(NPUUnavailableError) as caught:
            await client.embed("text")
        asked = [attempt.node for attempt in caught.value.attempts]
        assert len(asked) == len(set(asked)) == 3
        assert len({request_id for node in nodes for request_id in node.request_ids}) == 1


@pytest.mark.parametrize("seed", range(20))
@in_virtual_time
async def test_5_the_other_node_is_asked_second(seed):
    nodes = fleet(2)
    async with warm(nodes, seed=seed) as client:
        for node in nodes:
            node.embed = NodeFailed("boom", node=node.url, status=500)
        with pytest.raises(NPUUnavailableError) as caught:
            await client.embed("text")
        first, second, _ = (attempt.node for attempt in caught.value.attempts)
        assert first != second


@pytest.mark.parametrize("timeout", [0.0, 0.001, 0.2, 1.0, 7.0])
@in_virtual_time
async def test_6_one_deadline_covers_everything(timeout):
    nodes = fleet(3)
    async with warm(nodes) as client:
        for node in nodes:
            node.embed = hang
        began = now()
        with pytest.raises(DeadlineExceeded) as caught:
            await client.embed("text", timeout=timeout)
        assert now() - began <= timeout + 0.050
        assert isinstance(caught.value, TimeoutError)


@in_virtual_time
async def test_6_pauses_end_before_the_deadline():
    [node] = nodes = fleet(1)
    async with warm(nodes) as client:
        node.embed = NodeOverloaded("full", node=node.url, status=429, retry_after=0.3)
        began = now()
        with pytest.raises(NPUUnavailableError):
            await client.embed("text", timeout=0.5)
        assert now() - began <= 0.55


@in_virtual_time
async def test_6_the_first_probe_is_waited_for_within_the_deadline():
    [node] = nodes = fleet(1)
    node.health = hang
    async with client_of(nodes) as client:
        began = now()
        with pytest.raises(DeadlineExceeded):
            await client.embed("text", timeout=0.1)
        assert now() - began <= 0.15


@in_virtual_time
async def test_7_all_down_is_said_at_once_when_known_and_within_three_seconds_cold():
    nodes = fleet(3)
    nodes[0].die()
    nodes[1].freeze()
    nodes[2].health = report("draining")
    async with client_of(nodes) as client:
        began = now()
        with pytest.raises(NPUUnavailableError) as caught:
            await client.embed("text")
        assert now() - began <= 3.0
        assert not any(node.requests for node in nodes)
        for node in nodes:
            assert node.url in str(caught.value)
        began = now()
        with pytest.raises(NPUUnavailableError):
            await client.embed("text")
        assert now() - began <= 0.1


@in_virtual_time
async def test_8_nothing_is_retried_after_the_first_token():
    nodes = fleet(2)
    async with warm(nodes) as client:
        for node in nodes:
            node.pieces = ["Par", ConnectionLost("reset", node=node.url)]
        stream = client.stream("prompt")
        assert await anext(stream) == "Par"
        with pytest.raises(StreamInterrupted) as caught:
            await anext(stream)
        assert caught.value.partial_text == "Par"
        assert "Par" not in str(caught.value) + repr(caught.value)
        assert sum(len(node.requests) for node in nodes) == 1


@in_virtual_time
async def test_8_a_stream_that_fails_before_its_first_token_is_retried():
    nodes = fleet(2)
    async with warm(nodes) as client:
        for node in nodes:
            node.pieces = [ConnectionLost("reset", node=node.url)]
        nodes[1].pieces = ["Pa", "ris"]
        for _ in range(4):
            stream = client.stream("prompt")
            assert [piece async for piece in stream] == ["Pa", "ris"]
            assert stream.result.text == "Paris"
            assert stream.result.node == nodes[1].url


@in_virtual_time
async def test_8_what_was_never_sent_is_retried_free():
    nodes = fleet(6)
    options = ClientOptions()
    async with warm(nodes, options=options) as client:
        for node in nodes[:5]:
            node.embed = NodeUnreachable("cannot connect", node=node.url)
        for _ in range(3):
            result = await client.embed_result("text")
            assert result.node == nodes[5].url
        # The budget is as it was, so three calls that do need it have their two retries and no more.
        nodes[5].embed = NodeFailed("boom", node=nodes[5].url, status=500)
        with pytest.raises(NPUUnavailableError) as caught:
            await client.embed("text")
        assert [attempt.outcome for attempt in caught.value.attempts].count("NodeFailed") == 3


@in_virtual_time
async def test_9_vectors_of_two_spaces_are_never_mixed():
    nodes = [FakeNode("http://old:8081", "space-a"), FakeNode("http://new:8081", "space-b")]
    async with warm(nodes) as client:
        results = await asyncio.gather(*(client.embed_result("text") for _ in range(50)))
        assert len({result.space for result in results}) == 1
        many = await client.embed_many_result(["text"] * 1000)
        assert many.space == results[0].space
        assert len(many.served) == 1
        bound = next(node for node in nodes if node.space == many.space)
        bound.die()
        with pytest.raises((VectorSpaceMismatch, NPUUnavailableError)) as caught:
            await client.embed("text")
        assert "vector space" in str(caught.value)


@in_virtual_time
async def test_9_a_node_that_changes_its_space_between_two_probes_is_not_believed():
    nodes = fleet(2)
    async with warm(nodes) as client:
        await client.embed("text")
        nodes[0].space = "space-b"
        results = [await client.embed_result("text") for _ in range(10)]
        assert {result.node for result in results} == {nodes[1].url}
        assert len(nodes[0].requests) <= 2


@in_virtual_time
async def test_a_model_that_no_node_lists_is_not_found_and_an_alias_goes_where_it_is_listed():
    nodes = fleet(2)
    listed = report()
    models = [model.model_copy(update={"aliases": ("alias",)}) for model in listed.models[:1]]
    nodes[1].health = listed.model_copy(update={"models": (*models, *listed.models[1:])})
    async with warm(nodes) as client:
        results = [await client.embed_result("text", model="Alias:latest") for _ in range(5)]
        assert {result.node for result in results} == {nodes[1].url}
        with pytest.raises(ModelNotFound):
            await client.embed("text", model="nothing")
        assert (len(nodes[0].requests), len(nodes[1].requests)) == (0, 5)
