"""Callers who allow less time than a model now takes, beside callers who can wait. In virtual time."""

import asyncio
import contextlib

import pytest

from backend_client import DeadlineExceeded, NPUUnavailableError
from backend_client.options import BreakerOptions
from tests.unit.backend_client.fakes import fleet, hang, warm
from tests.unit.backend_client.virtual_time import in_virtual_time


def answers_after(node, seconds):
    async def embed(call):
        await asyncio.sleep(seconds)
        return await node.vectors(call)

    return embed


@in_virtual_time
@pytest.mark.parametrize("count", [1, 3])
async def test_impatient_callers_do_not_make_a_slower_fleet_unavailable_to_patient_ones(count):
    nodes = fleet(count)
    async with warm(nodes) as client:
        for _ in range(20):
            await client.embed("text")
        for node in nodes:
            node.embed = answers_after(node, 0.3)
        ends = asyncio.get_running_loop().time() + 20

        async def load(timeout):
            failures = []
            while asyncio.get_running_loop().time() < ends:
                try:
                    await client.embed("text", timeout=timeout)
                except NPUUnavailableError as error:
                    failures.append(error)
                await asyncio.sleep(0.1)
            return failures

        impatient = [asyncio.ensure_future(load(0.18)) for _ in range(8)]
        patient = await asyncio.gather(load(10), load(10))
        await asyncio.gather(*impatient)
        assert patient == [[], []]


@in_virtual_time
async def test_one_pause_seen_by_many_callers_ejects_no_model(caplog):
    nodes = fleet(2)
    async with warm(nodes) as client:
        for node in nodes:
            node.embed = answers_after(node, 0.01)
        for _ in range(20):
            await client.embed("text")
        for node in nodes:
            node.embed = answers_after(node, 0.1)

        async def impatient():
            with contextlib.suppress(DeadlineExceeded, NPUUnavailableError):
                await client.embed("text", timeout=0.06)

        # Eight attempts on each node end after 60 ms: two whole silences would be 100 ms.
        await asyncio.gather(*(impatient() for _ in range(16)))
        assert "ejected" not in caplog.text


@in_virtual_time
@pytest.mark.parametrize("timeout", [0.1, 0.3])
async def test_a_fleet_whose_engines_all_hang_is_unavailable_at_once_a_second_later(timeout):
    nodes = fleet(3)
    async with warm(nodes) as client:
        for _ in range(20):
            await client.embed("text")
        for node in nodes:
            node.embed = hang
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < 60:
            try:
                await client.embed("text", timeout=timeout)
            except DeadlineExceeded:
                continue
            except NPUUnavailableError as error:
                assert "ejected" in str(error)  # noqa: PT017
                break
        # Two attempts on each of the others, and a second (or two attempts) on the last one.
        most = 4 * timeout + max(BreakerOptions().silence_last, 2 * timeout) + 2 * timeout
        assert asyncio.get_running_loop().time() - began <= most
