"""What a request to the cloud may cost at most: every part of its body counts."""

import json
from decimal import Decimal

import pytest
from aiohttp import web

from backend_client import CloudClient, CloudRejected, CloudSettings, SpendCapReached

QUESTION = [{"role": "user", "content": "Where?"}]
LONG = "word " * 1000
FUNCTION = {"name": "f", "description": LONG, "parameters": {"type": "object"}}
PARTS = {
    "functions": [FUNCTION],
    "tools": [{"type": "function", "function": FUNCTION}],
    # A schema may have properties of any name.
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "image_url", "title": LONG}}},
    "prediction": {"type": "content", "content": LONG},
    "metadata": {"note": LONG},
    "user": LONG,
    "a_field_of_tomorrow": [LONG],
}


def client_of(cloud, cap=None, *, output=0):
    prices = {"chat": {"input": 1, "output": output}}
    return CloudClient(CloudSettings(base_url=cloud.url, api_key="k", chat_model="chat", prices=prices, spend_cap=cap))


async def bound_of(cloud, body, **price):
    """Millionths of the cap that a request may cost: the cloud does not report what it used."""

    async def respond(_):
        choices = [{"index": 0, "message": {"role": "assistant", "content": "Here."}, "finish_reason": "stop"}]
        return web.json_response({"model": "chat", "choices": choices})

    cloud.respond = respond
    async with client_of(cloud, **price) as client:
        await client.post("/v1/chat/completions", body)
        assert client.ledger.cloud.estimated_calls == 1
        return int(client.ledger.cloud.cost * 1_000_000)


@pytest.mark.parametrize("name", PARTS)
async def test_every_part_of_the_body_counts_its_bytes(cloud, name):
    without = await bound_of(cloud, {"messages": QUESTION})
    bound = await bound_of(cloud, {"messages": QUESTION, name: PARTS[name]})
    assert bound - without >= len(json.dumps(PARTS[name])) >= len(LONG)
    body = {"messages": QUESTION, name: PARTS[name]}
    async with client_of(cloud, Decimal(bound - 1) / 1_000_000) as client:
        with pytest.raises(SpendCapReached):
            await client.post("/v1/chat/completions", body)


async def test_what_stands_beside_an_image_counts(cloud):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    plain = await bound_of(cloud, {"messages": [{"role": "user", "content": [image]}]})
    beside = await bound_of(cloud, {"messages": [{"role": "user", "content": [{**image, "text": LONG}]}]})
    assert beside - plain >= len(LONG)
    # The image itself counts as the most that one may cost, not by its bytes.
    assert 50_000 < plain < 60_000


async def test_what_was_predicted_in_vain_counts_as_written_for_each_answer(cloud):
    body = {"messages": QUESTION, "max_tokens": 10, "n": 3}
    without = await bound_of(cloud, body, output=1)
    bound = await bound_of(cloud, {**body, "prediction": {"type": "content", "content": LONG}}, output=1)
    assert bound - without >= (1 + 3) * len(LONG)


@pytest.mark.parametrize(
    "part", [{"service_tier": "priority"}, {"web_search_options": {}}, {"audio": {"voice": "alloy", "format": "wav"}}]
)
async def test_what_has_no_price_by_the_token_is_not_sent_under_a_cap(cloud, part):
    assert await bound_of(cloud, {"messages": QUESTION, **part}) > 0
    cloud.requests.clear()
    async with client_of(cloud, Decimal(1)) as client:
        with pytest.raises(CloudRejected, match="the spend cap cannot bound"):
            await client.post("/v1/chat/completions", {"messages": QUESTION, **part})
        assert client.ledger.left == 1
    assert not cloud.requests
