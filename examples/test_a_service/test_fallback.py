from decimal import Decimal

import pytest
from starlette.testclient import TestClient

from backend_client import InferenceClient, NPUClient, NPUUnavailableError, StreamInterrupted
from backend_client.cloud import CloudClient
from backend_client.testing import cut, drop, fake_vector, hang, status
from by_hand import embed
from service import make_app
from service_fastapi import app


@pytest.fixture
async def ask(fake_fleet, fake_cloud, aiohttp_client):
    """What the service answers: status, and the source of the answer or None."""
    http = await aiohttp_client(make_app())

    async def ask(prompt="Where?"):
        async with http.post("/answer", data=prompt) as reply:
            return reply.status, (await reply.json())["source"] if reply.status == 200 else None

    return ask


async def test_1_a_node_answers_and_the_cloud_is_not_asked(ask, fake_fleet, fake_cloud):
    assert await ask() == (200, "node")
    fake_cloud.assert_nothing_sent()


async def test_2_the_cloud_answers_while_all_nodes_are_down(ask, fake_fleet, fake_cloud):
    for index in range(2):
        fake_fleet.kill(index)
    assert await ask() == (200, "cloud")
    fake_cloud.assert_sent("/v1/chat/completions", times=1, model="fake-cloud-writer")


@pytest.mark.parametrize("fake_fleet", [1], indirect=True)
@pytest.mark.parametrize("step", [status(500), status(503, "engine_unavailable"), drop(), hang()])
async def test_3_the_cloud_answers_what_the_only_node_fails(ask, fake_fleet, step):
    fake_fleet[0].script(*[step] * 3)
    assert await ask() == (200, "cloud")


@pytest.mark.parametrize("fake_fleet", [3], indirect=True)
async def test_4_the_cloud_answers_while_all_nodes_are_busy(ask, fake_fleet):
    for node in fake_fleet:
        node.script(status(429, "overloaded", retry_after=60))
    assert await ask() == (200, "cloud")


async def test_5_a_request_that_is_wrong_goes_nowhere_else(ask, fake_fleet, fake_cloud):
    for node in fake_fleet:
        node.script(status(400, "invalid_request"))
    assert await ask() == (400, None)
    fake_cloud.assert_nothing_sent()


async def test_6_local_only_stays_local(fake_fleet, fake_cloud):
    for index in range(2):
        fake_fleet.kill(index)
    async with InferenceClient.from_settings(local_only=True) as client:
        with pytest.raises(NPUUnavailableError):
            await client.generate("Where?", timeout=2)
    fake_cloud.assert_nothing_sent()


@pytest.mark.parametrize(
    "step",
    [status(429, "rate_limit_exceeded", retry_after=9), status(402, "insufficient_quota"), status(500), hang(), drop()],
)
async def test_7_the_service_is_unavailable_when_the_cloud_fails_too(ask, fake_fleet, fake_cloud, step):
    for index in range(2):
        fake_fleet.kill(index)
    fake_cloud.script(step)
    assert await ask() == (503, None)


async def test_8_a_stream_that_the_cloud_cuts_says_what_had_arrived(fake_fleet, fake_cloud):
    for index in range(2):
        fake_fleet.kill(index)
    fake_cloud.script(cut(2))
    async with InferenceClient.from_settings() as client:
        with pytest.raises(StreamInterrupted) as caught:
            async for _ in client.stream("Where?"):
                pass
    assert caught.value.partial_text == "The capital "


async def test_9_the_cloud_embeds_in_the_space_that_the_settings_map_and_in_no_other(fake_fleet, fake_cloud):
    async with InferenceClient.from_settings() as client:
        before = await client.embed_result("text")
        for index in range(2):
            fake_fleet.kill(index)
        after = await client.embed_result("text")
        assert (before.source, after.source, after.space) == ("node", "cloud", before.space)
    async with InferenceClient.from_settings(spaces={"fake-embedder": "another-space"}) as client:
        with pytest.raises(NPUUnavailableError, match="another-space"):
            await client.embed("text", model="fake-embedder", timeout=2)


async def test_10_the_spend_cap_ends_the_fallback(fake_fleet, fake_cloud):
    for index in range(2):
        fake_fleet.kill(index)
    fake_cloud.usage = (20, 100)  # tokens of each prompt and answer
    price = {"input": 1_000_000, "output": 1_000_000}  # for a million tokens, so 1 for each
    prices = {"fake-cloud-writer": price, "fake-cloud-embedder": price}
    async with InferenceClient.from_settings(cloud=fake_cloud.settings(prices=prices, spend_cap=300)) as client:
        await client.generate("Where?", max_new_tokens=100)
        assert client.ledger.cloud.cost == Decimal(120)
        with pytest.raises(NPUUnavailableError, match="spend cap"):
            await client.generate("Where?", max_new_tokens=100)  # might cost more than the 180 that are left
    fake_cloud.assert_sent(times=1)


def test_11_a_node_that_comes_back_serves_again(fake_fleet, fake_cloud):
    for index in range(2):
        fake_fleet.kill(index)
    with TestClient(app) as http:
        assert http.post("/answer", params={"prompt": "Where?"}).json()["source"] == "cloud"
        fake_fleet.revive(0)
        while http.post("/answer", params={"prompt": "Where?"}).json()["source"] == "cloud":
            pass
    fake_fleet.assert_sent("/inference")


async def test_12_the_fallback_by_hand(fake_fleet, fake_cloud):
    async with NPUClient.from_settings() as npu_client, CloudClient.from_settings() as openai_client:
        assert await embed("text", npu_client, openai_client) == fake_vector("text").tolist()
        fake_cloud.assert_nothing_sent()
        for index in range(2):
            fake_fleet.kill(index)
        assert await embed("text", npu_client, openai_client) == fake_vector("text").tolist()
    fake_cloud.assert_sent("/v1/embeddings", times=1)
