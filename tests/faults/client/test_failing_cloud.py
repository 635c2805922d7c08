"""A cloud that fails, refuses or returns malformed vectors, and the client beside it."""

import pytest
from aiohttp import web

from backend_client import CloudClient, NPUUnavailableError, RequestRejected
from backend_client.errors import CloudRejected, CloudUnavailable
from tests.faults.client.test_fallback import DEAD, SPACES, fallback, settings


def answering(status, message="no"):
    async def respond(_):
        return web.json_response({"error": {"message": message}}, status=status)

    return respond


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_what_the_cloud_says_about_the_request_is_a_rejection(cloud, status):
    cloud.respond = answering(status)
    async with fallback([DEAD], cloud) as client:
        with pytest.raises(CloudRejected) as caught:
            await client.generate("prompt")
        assert isinstance(caught.value, RequestRejected)
        assert caught.value.status == status


@pytest.mark.parametrize("status", [301, 401, 402, 403, 404, 405, 409, 418, 429, 500, 503])
async def test_any_other_answer_of_the_cloud_is_unavailability(cloud, status):
    """Our key, our model name or our URL is wrong, or the cloud is down: not the fault of whoever asked."""
    cloud.respond = answering(status)
    async with fallback([DEAD], cloud, spaces=SPACES) as client:
        for call in (client.generate, client.embed):
            with pytest.raises(NPUUnavailableError) as caught:
                await call("prompt")
            assert not isinstance(caught.value, RequestRejected)
            assert caught.value.cloud_error.status == status
            assert caught.value.attempts[-1].status == status
        with pytest.raises(NPUUnavailableError):
            [_ async for _ in client.stream("prompt")]
        assert client.cloud_breaker.value == "closed"
        assert client.ledger.cloud.calls == 0


@pytest.mark.parametrize("target", ["/v1/elsewhere", "https://127.0.0.1:9/v1/chat/completions"])
async def test_a_redirect_of_the_cloud_is_not_followed(cloud, target):
    async def respond(_):
        return web.Response(status=307, headers={"Location": target})

    cloud.respond = respond
    async with fallback([DEAD], cloud) as client:
        with pytest.raises(NPUUnavailableError) as caught:
            await client.generate("prompt")
    assert caught.value.cloud_error.status == 307
    assert len(cloud.requests) == 1


async def test_a_cloud_that_fails_is_left_alone(cloud):
    cloud.respond = answering(lambda: web.json_response({"error": {"message": "no"}}, status=500))
    async with fallback([DEAD], cloud) as client:
        for _ in range(10):
            with pytest.raises(NPUUnavailableError):
                await client.generate("prompt")
    assert len(cloud.requests) == 5


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"index": 0, "embedding": []}, "vectors are empty"),
        ({"index": 1, "embedding": [1, 2]}, "index is out of range"),
        ({"index": 0, "embedding": [0, 0]}, "all zeros"),
    ],
)
async def test_vectors_of_the_cloud_that_are_empty_zero_or_of_another_text_are_malformed(cloud, row, problem):
    async def respond(_):
        return web.json_response({"object": "list", "model": "m", "data": [row]})

    cloud.respond = respond
    async with CloudClient(settings(cloud)) as direct:
        with pytest.raises(CloudUnavailable, match=problem):
            await direct.embed("text")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after-ms": "1500", "Retry-After": "2"}, 1.5),
        ({"Retry-After": "soon"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_when_a_busy_cloud_asks_to_be_asked_again_is_told(cloud, status, headers, seconds):
    async def respond(_):
        return web.json_response({"error": {}}, status=status, headers=headers)

    cloud.respond = respond
    async with fallback([DEAD], cloud) as client:
        with pytest.raises(NPUUnavailableError) as caught:
            await client.generate("prompt")
    assert (caught.value.cloud_error.retry_after, caught.value.retry_after) == (seconds, seconds)
