"""The fleet first, then the cloud, and when not: scripted node, scripted cloud, the real OpenAI SDK."""

import asyncio
import re
from collections import Counter
from decimal import Decimal

import numpy as np
import pytest
from aiohttp import web

from backend_client import (
    ClientOptions,
    CloudClient,
    InferenceClient,
    NPUClient,
    NPUUnavailableError,
    RequestRejected,
    StreamInterrupted,
)
from backend_client.errors import ClientClosed, CloudRejected, CloudUnavailable, ModelNotFound, SpendCapReached
from backend_client.options import Timeouts
from backend_client.testing import cut
from tests.faults.client.gateways import cloud_settings, streaming
from tests.faults.scripted_node import ANSWER, answering, choice, data_event, error_response, streamed, vectors_for

DEAD = "http://127.0.0.1:1"


def fallback(nodes, cloud, *, spaces=None, local_only=False, **more):
    return InferenceClient(
        NPUClient(nodes, spaces=spaces), CloudClient(cloud_settings(cloud, **more)), local_only=local_only
    )


SPACES = {"fake-embedder": "space-a"}


async def test_a_node_that_can_serve_keeps_everything_local(scripted, cloud):
    async with fallback([scripted.url], cloud) as client:
        assert (await client.embed_result("text")).source == "node"
        assert (await client.generate("prompt")).source == "node"
        assert [piece async for piece in client.stream("prompt")] == ANSWER
        assert (client.ledger.local.calls, client.ledger.cloud.calls) == (3, 0)
        assert (client.ledger.local.prompt_tokens, client.ledger.local.completion_tokens) == (2, 8)
    assert not cloud.requests


async def test_the_cloud_takes_over_when_the_node_dies(scripted, cloud):
    async with fallback([scripted.url], cloud) as client:
        before = await client.embed_result("text")
        scripted.health_status = "draining"

        scripted.respond = answering(lambda: error_response(503, "draining", retry_after_ms=1000))
        after = await client.embed_result("text")
        assert (before.source, after.source) == ("node", "cloud")
        assert before.space == after.space == "space-a"
        np.testing.assert_allclose(before.vector, after.vector, rtol=1e-6)
        assert [attempt.outcome for attempt in after.attempts] == ["NodeNotServing", "ok"]
        answer = await client.generate("prompt")
        assert (answer.source, answer.text, answer.model) == ("cloud", "".join(ANSWER), "cloud-chat")
        stream = client.stream("prompt")
        assert [piece async for piece in stream] == ANSWER
        assert stream.result.source == "cloud"
        texts = [f"text {index}" for index in range(100)]
        many = await client.embed_many_result(texts)
        np.testing.assert_allclose(many.vectors, vectors_for(texts), rtol=1e-6)
        assert many.served == {cloud.url: 100}
    assert all(request.headers["Authorization"] == "Bearer sk-cloud" for request in cloud.requests)


async def test_the_ledger_is_exact_to_the_token(cloud):
    prices = {"cloud-chat": {"input": 2, "output": 8}, "cloud-minilm": {"input": 1}}
    async with fallback([DEAD], cloud, spaces=SPACES, prices=prices) as client:
        for _ in range(3):
            await client.generate("prompt")
        [_ async for _ in client.stream("prompt")]
        await client.embed("a longer text")
        tally = client.ledger.cloud
    assert (tally.calls, tally.prompt_tokens, tally.completion_tokens) == (5, 5 * 13, 4 * 5)
    assert tally.cost == (4 * (13 * 2 + 5 * 8) + 13) / Decimal(1_000_000)
    assert tally.estimated_calls == 0


async def generate(client, **options):
    return await client.generate("prompt", **options)


async def stream(client, **options):
    answer = client.stream("prompt", **options)
    assert [piece async for piece in answer] == ANSWER
    return answer.result


async def chat(client, **options):
    return await client.chat([{"role": "user", "content": "prompt"}], **options)


@pytest.mark.parametrize("call", [generate, stream, chat])
async def test_a_model_that_no_node_has_goes_to_the_cloud_if_that_has_it(fleet, cloud, call):
    async with fallback(fleet.urls, cloud, chat_models={"large": "cloud-large"}) as client:
        result = await call(client, model="large")
        assert (result.source, result.model, result.text) == ("cloud", "cloud-large", "".join(ANSWER))
        with pytest.raises(ModelNotFound, match="no cloud model is declared for medium") as caught:
            await call(client, model="medium")
    assert isinstance(caught.value, NPUUnavailableError)
    assert isinstance(caught.value, RequestRejected)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert len(cloud.requests) == 1
    # Nothing is retried: a node may be asked once whether it knows the name as an alias.
    asked = Counter((request.node, request.body["model"]) for request in fleet.requests)
    assert all(times == 1 for times in asked.values())


async def test_cut_vectors_go_to_the_model_that_is_mapped_for_their_space(cloud):
    cloud.dimensions = 4
    async with fallback([DEAD], cloud, spaces=SPACES, embedding_models={"space-a-4": "cloud-cut"}) as client:
        for _ in range(2):
            result = await client.embed_result("text", dimensions=4)
            assert (result.source, result.space, len(result.vector)) == ("cloud", "space-a-4", 4)


@pytest.mark.parametrize("how", ["client", "call", "device"])
async def test_what_must_stay_never_leaves(cloud, how):
    async with fallback([DEAD], cloud, spaces=SPACES, local_only=how == "client") as client:
        options = {"call": {"local_only": True}, "device": {"require_device": "NPU"}}.get(how, {})
        for call in (client.embed, client.generate):
            with pytest.raises(NPUUnavailableError, match="the cloud was not asked"):
                await call("text", **options)
        with pytest.raises(NPUUnavailableError):
            [_ async for _ in client.stream("text", **options)]
    assert not cloud.requests


async def test_the_spend_cap_is_never_overrun(cloud):
    prices = {"cloud-chat": {"input": 1, "output": 1}, "cloud-minilm": {"input": 1}}
    # A call may cost the bytes of its body, 64 tokens of a template and 10 of the answer: about 150. It costs 18.
    async with fallback([DEAD], cloud, prices=prices, spend_cap=Decimal("0.000400")) as client:
        results = await asyncio.gather(
            *(client.generate("prompt", max_new_tokens=10) for _ in range(20)), return_exceptions=True
        )
        served = [result for result in results if not isinstance(result, Exception)]
        refused = [result for result in results if isinstance(result, Exception)]
        assert len(served) == len(cloud.requests) == 2
        assert all(isinstance(error.cloud_error, SpendCapReached) for error in refused)
        assert client.ledger.cloud.cost == Decimal(18 * len(cloud.requests)) / 1_000_000


async def test_no_fallback_after_the_first_piece(scripted, cloud):
    scripted.script(cut(1))
    async with fallback([scripted.url], cloud) as client:
        with pytest.raises(StreamInterrupted) as caught:
            [_ async for _ in client.stream("prompt")]
    assert caught.value.partial_text == ANSWER[0]
    assert not cloud.requests


async def test_a_cloud_stream_that_dies_keeps_its_text_and_is_counted_at_its_bound(cloud):
    part = {"model": "cloud-chat", "choices": [choice({"content": "Par"})]}
    cloud.respond = answering(lambda: streamed(part, done=False))
    async with fallback([DEAD], cloud) as client:
        with pytest.raises(StreamInterrupted) as caught:
            [_ async for _ in client.stream("prompt", max_new_tokens=10)]
        assert caught.value.partial_text == "Par"
        assert client.ledger.cloud.estimated_calls == 1
        assert client.ledger.cloud.completion_tokens == 10


async def test_the_deadline_covers_the_fallback(scripted, cloud):
    released = asyncio.Event()

    async def hang(_):
        await released.wait()

    scripted.respond = cloud.respond = hang
    async with fallback([scripted.url], cloud) as client:
        await client.npu.health()
        with pytest.raises(NPUUnavailableError) as caught:
            await client.generate("prompt", timeout=3)
        assert [attempt.node for attempt in caught.value.attempts] == [scripted.url, cloud.url]
        released.set()


@pytest.mark.parametrize("kind", ["embed", "generate", "stream"])
async def test_closing_ends_calls_that_wait_for_the_cloud_at_once(cloud, kind):
    arrived = asyncio.Event()

    async def never(_request):
        arrived.set()
        await asyncio.get_running_loop().create_future()

    cloud.respond = never
    client = fallback([DEAD], cloud, spaces=SPACES)
    calls = {
        "embed": lambda: client.embed("text"),
        "generate": lambda: client.generate("prompt"),
        "stream": lambda: anext(client.stream("prompt")),
    }
    call = asyncio.ensure_future(calls[kind]())
    await arrived.wait()
    await client.close()
    with pytest.raises(ClientClosed):
        await asyncio.wait_for(call, 30)


async def test_vectors_of_other_dimensions_than_the_space_has_are_refused(scripted, cloud):
    cloud.dimensions = 16
    async with fallback([scripted.url], cloud) as client:
        await client.embed("text")

        scripted.respond = answering(lambda: error_response(503, "engine_unavailable", retry_after_ms=60_000))
        with pytest.raises(NPUUnavailableError, match="16 dimensions") as caught:
            await client.embed("text")
        assert isinstance(caught.value.cloud_error, CloudUnavailable)


async def test_truncation_stays_with_the_nodes(scripted, cloud):
    """The cloud is asked only for texts so short that there is nothing to cut off: 252 bytes are at most 252 tokens."""

    async with fallback([scripted.url], cloud) as client:
        await client.embed("text")
        scripted.respond = answering(lambda: error_response(503, "engine_unavailable", retry_after_ms=60_000))
        with pytest.raises(NPUUnavailableError, match="cannot truncate"):
            await client.embed("x" * 253, truncate=True)
        assert not cloud.requests
        assert (await client.embed_result("x" * 252, truncate=True)).source == "cloud"
        assert (await client.embed_result("x" * 253, truncate=False)).source == "cloud"
    async with CloudClient(cloud_settings(cloud)) as direct:
        with pytest.raises(CloudRejected, match="cannot truncate"):
            await direct.embed("text", truncate=True)


async def test_a_cap_is_kept_for_models_without_a_price(cloud):
    prices = {"cloud-chat": {"input": 2, "output": 8}, "cloud-minilm": {"input": 1}}
    async with CloudClient(cloud_settings(cloud, prices=prices, spend_cap=1)) as direct:
        with pytest.raises(SpendCapReached, match="lacks dear-model"):
            await direct.generate("prompt", model="dear-model")
        assert (await direct.generate("prompt")).text
    assert len(cloud.requests) == 1


def whole_stream(client):
    async def call(prompt):
        return [piece async for piece in client.stream(prompt)]

    return call


def refusing(status):
    return answering(lambda: web.json_response({"error": {"message": "no"}}, status=status))


@pytest.mark.parametrize("field", ["type", "code"])
@pytest.mark.parametrize("call", [generate, stream])
async def test_an_account_that_is_used_up_is_the_clouds_state_and_not_the_requests_fault(cloud, call, field):
    error = {
        "message": "Budget has been exceeded!",
        "type": None,
        "param": None,
        "code": "400",
        field: "budget_exceeded",
    }
    cloud.respond = answering(lambda: web.json_response({"error": error}, status=400))
    async with fallback([DEAD], cloud) as client:
        with pytest.raises(NPUUnavailableError) as caught:
            await call(client)
        assert isinstance(caught.value.cloud_error, CloudUnavailable)
        assert client.ledger.cloud.calls == 0


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 413, 418, 422, 429, 500, 503])
async def test_only_a_400_413_or_422_of_the_cloud_is_about_the_request(cloud, status):
    """Otherwise our key, model name or URL is wrong, or the cloud is down: the request is not at fault."""
    cloud.respond = refusing(status)
    async with fallback([DEAD], cloud, spaces=SPACES) as client:
        for call in (client.generate, client.embed, whole_stream(client)):
            with pytest.raises((NPUUnavailableError, CloudRejected)) as caught:
                await call("prompt")
            rejected = isinstance(caught.value, RequestRejected)
            assert rejected == (status in {400, 413, 422})
            assert (caught.value if rejected else caught.value.cloud_error).status == status
            assert caught.value.attempts[-1].status == status
        assert client.cloud_breaker.value == "closed"
        assert client.ledger.cloud.calls == 0


@pytest.mark.parametrize("target", ["/v1/elsewhere", "https://127.0.0.1:9/v1/chat/completions"])
async def test_a_redirect_of_the_cloud_is_not_followed(cloud, target):
    cloud.respond = answering(lambda: web.Response(status=307, headers={"Location": target}))
    async with fallback([DEAD], cloud) as client:
        with pytest.raises(NPUUnavailableError) as caught:
            await client.generate("prompt")
    assert caught.value.cloud_error.status == 307
    assert len(cloud.requests) == 1


async def test_a_model_of_the_cloud_that_fails_leaves_the_others_alone(cloud):
    async with fallback([DEAD], cloud, spaces=SPACES) as client:
        cloud.respond = answering(lambda: web.json_response({"model": "another", "choices": []}))
        for _ in range(6):
            with pytest.raises(NPUUnavailableError) as caught:
                await client.generate("prompt")
        assert "cloud-chat of the cloud" in str(caught.value)
        assert "ejected" in str(caught.value)
        assert len(cloud.requests) == 5
        cloud.respond = None
        assert (await client.embed_result("text")).source == "cloud"
        assert client.healthz().cloud == "available"


async def test_a_cloud_that_fails_is_left_alone_and_healthz_says_so(cloud):
    cloud.respond = refusing(500)
    async with fallback([DEAD], cloud) as client:
        status = client.healthz()
        assert (status.serving, status.cloud, status.cloud_trouble) == (True, "available", None)
        for _ in range(10):
            with pytest.raises(NPUUnavailableError):
                await client.generate("prompt")
        status = client.healthz()
        assert (status.serving, status.cloud) == (False, "unavailable")
        assert re.fullmatch(r"ejected for \d+\.\d s more after consecutive failures", status.cloud_trouble)
    assert len(cloud.requests) == 5
    assert client.healthz().cloud_trouble == "the client is closed"


@pytest.mark.parametrize(
    ("more", "trouble"),
    [
        ({"local_only": True}, "local_only is set"),
        (
            {"spend_cap": 0, "prices": {name: {"input": 1, "output": 1} for name in ("cloud-chat", "cloud-minilm")}},
            "the spend cap is reached",
        ),
    ],
)
async def test_healthz_says_why_the_cloud_would_not_be_asked(cloud, more, trouble):
    status = fallback([DEAD], cloud, **more).healthz().as_dict()
    assert (status["serving"], status["cloud"], status["cloud_trouble"]) == (False, "unavailable", trouble)


async def test_vectors_of_the_cloud_for_another_text_are_malformed(cloud):
    row = {"index": 1, "embedding": [1, 2]}
    cloud.respond = answering(lambda: web.json_response({"object": "list", "model": "m", "data": [row]}))
    async with CloudClient(cloud_settings(cloud)) as direct:
        with pytest.raises(CloudUnavailable, match="index is out of range"):
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
    cloud.respond = answering(lambda: web.json_response({"error": {}}, status=status, headers=headers))
    async with fallback([DEAD], cloud) as client:
        with pytest.raises(NPUUnavailableError) as caught:
            await client.generate("prompt")
    assert (caught.value.cloud_error.retry_after, caught.value.retry_after) == (seconds, seconds)


@pytest.mark.parametrize("options", [{}, {"timeout": 60}])
async def test_a_stream_of_the_cloud_is_cut_by_the_time_of_its_caller_and_by_no_default(cloud, options):
    now = [0.0]
    async with CloudClient(cloud_settings(cloud), clock=lambda: now[0]) as client:
        stream = client.stream("prompt", **options)
        assert await anext(stream) == ANSWER[0]
        now[0] += 1000.0
        if options:
            with pytest.raises(StreamInterrupted, match="time") as caught:
                await anext(stream)
            assert caught.value.partial_text == ANSWER[0]
        else:
            assert [piece async for piece in stream] == ANSWER[1:]


async def test_a_stream_of_the_cloud_that_falls_silent_is_interrupted(cloud):
    part = data_event({"model": "cloud-chat", "choices": [choice({"content": "Paris"})]})
    cloud.respond = streaming(part, asyncio.Event().wait)
    options = ClientOptions(timeouts=Timeouts(silence=0.1))
    async with CloudClient(cloud_settings(cloud), options=options) as client:
        with pytest.raises(StreamInterrupted) as caught:
            [_ async for _ in client.stream("prompt")]
        assert caught.value.partial_text == "Paris"
