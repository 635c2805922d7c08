"""`embed_many` when batches fail, in virtual time."""

import asyncio

import numpy as np
import pytest

from backend_client import NPUUnavailableError
from backend_client.errors import (
    AuthenticationFailed,
    EmbedManyFailed,
    EmbedManyUnavailable,
    ModelMissing,
    ModelNotFound,
    NodeFailed,
)
from tests.unit.backend_client.fakes import fleet, hang, warm
from tests.unit.backend_client.virtual_time import in_virtual_time


@in_virtual_time
async def test_a_fleet_that_dies_on_the_way_is_unavailable_and_keeps_what_was_done():
    nodes = fleet(2)
    async with warm(nodes) as client:

        def progress(done, _):
            if done >= 640:
                for node in nodes:
                    node.die()

        with pytest.raises(NPUUnavailableError) as caught:
            await client.embed_many(["text"] * 20_000, progress=progress)
        assert isinstance(caught.value, EmbedManyUnavailable)
        assert isinstance(caught.value, EmbedManyFailed)
        done = ~np.isnan(caught.value.vectors).any(axis=1)
        assert 640 <= done.sum() < 20_000
        for failure in caught.value.failures:
            assert not done[failure.start : failure.stop].any()


@in_virtual_time
async def test_a_wrong_key_costs_one_request_per_node_for_any_number_of_texts():
    nodes = fleet(3)
    async with warm(nodes) as client:
        for node in nodes:
            node.embed = AuthenticationFailed("wrong key", node=node.url, status=401)
        with pytest.raises(AuthenticationFailed):
            await client.embed_many(["text"] * 20_000)
        assert all(len(node.requests) <= 1 for node in nodes)


@in_virtual_time
async def test_a_model_that_no_node_has_costs_few_requests_for_any_number_of_texts():
    nodes = fleet(3)
    async with warm(nodes) as client:
        for node in nodes:
            node.embed = ModelMissing("no such model", node=node.url, status=404)
        with pytest.raises(NPUUnavailableError) as caught:
            await client.embed_many(["text"] * 20_000, model="misspelt")
        assert type(caught.value) is ModelNotFound
        # Batches are started one for each node.
        assert all(len(node.requests) <= 3 for node in nodes)


@in_virtual_time
async def test_an_exception_from_outside_the_package_ends_everything_unchanged():
    [node] = nodes = fleet(1)
    async with warm(nodes) as client:

        async def fails_for_b(call):
            if "b" in call.texts:
                raise AssertionError("not a failure that the client knows")
            return await node.vectors(call)

        node.embed = fails_for_b
        with pytest.raises(AssertionError):
            await client.embed_many(["a"] * 64 + ["b"] * 64)


@in_virtual_time
async def test_all_batches_run_at_once_after_the_first_successes():
    nodes = fleet(2)
    async with warm(nodes) as client:
        most = 0

        async def counting(call):
            nonlocal most
            most = max(most, sum(status.in_flight for status in client.status()))
            await asyncio.sleep(0.05)
            return await nodes[0].vectors(call)

        for node in nodes:
            node.embed = counting
        await client.embed_many(["text"] * 64 * 20)
        assert most == client.backend.concurrency()


@in_virtual_time
async def test_leaving_embed_many_leaves_no_batch_behind():
    nodes = fleet(2)
    async with warm(nodes) as client:
        for node in nodes:
            node.embed = hang
        task = asyncio.create_task(client.embed_many(["text"] * 1000))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(status.in_flight == 0 for status in client.status())


@in_virtual_time
async def test_failed_nodes_everywhere_raise_the_one_error_of_all_batches():
    nodes = fleet(2)
    async with warm(nodes) as client:
        for node in nodes:
            node.embed = NodeFailed("boom", node=node.url, status=500)
        with pytest.raises(NPUUnavailableError):
            await client.embed_many(["text"] * 1000)
