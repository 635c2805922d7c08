"""What goes over the wire, and what comes of what comes back: against a scripted node on real sockets."""

import contextlib
import re
import socket
from functools import partial

import numpy as np
import pytest
from aiohttp import web

from backend_client import (
    ClientOptions,
    InferenceClient,
    NPUClient,
    NPUUnavailableError,
    RequestRejected,
    StreamInterrupted,
)
from backend_client.errors import AuthenticationFailed, ContextLengthExceeded, EmbedManyFailed, PayloadTooLarge
from backend_client.options import Timeouts
from tests.faults.client.gateways import streaming
from tests.faults.scripted_node import (
    ANSWER,
    EMBEDDER,
    WRITER,
    answering,
    done_event,
    error_response,
    sse,
    streamed,
    vectors_for,
)


@pytest.fixture
async def client(scripted):
    async with NPUClient([scripted.url], api_key="sk-test") as client:
        yield client


async def test_an_embedding_request_carries_the_key_the_deadline_and_one_id(scripted, client):
    await client.embed("text", timeout=60, priority="batch")
    [request] = scripted.requests
    assert request.headers["Authorization"] == "Bearer sk-test"
    assert re.fullmatch(r"req_[0-9a-f]{24}", request.headers["X-Request-ID"])
    assert 30_000 < int(request.headers["X-Request-Timeout-Ms"]) <= 60_000
    assert request.headers["X-Priority"] == "batch"
    assert request.headers["Accept"] == "application/octet-stream"
    # Vectors do not compress, and nothing here would unpack them.
    assert request.headers["Accept-Encoding"] == "identity"
    assert scripted.bodies == [{"texts": ["text"], "model": EMBEDDER}]


WHOLE, START = "X-Request-Timeout-Ms", "X-NPU-Start-Timeout-Ms"


async def test_a_node_hears_when_a_stream_must_begin_and_that_it_may_go_on(scripted, client):
    await client.generate("prompt")
    assert [piece async for piece in client.stream("prompt")] == ANSWER
    assert [piece async for piece in client.stream("prompt", timeout=60)] == ANSWER
    found = [{name for name in (WHOLE, START) if name in request.headers} for request in scripted.requests]
    assert found == [{WHOLE}, {START}, {WHOLE, START}]
    assert all(30_000 < int(scripted.requests[2].headers[name]) <= 60_000 for name in (WHOLE, START))


async def test_a_caller_who_reads_slowly_gets_nothing_after_the_time_of_the_call(scripted):
    now = [0.0]
    async with NPUClient([scripted.url], clock=lambda: now[0]) as client:
        for options, cut in ({}, False), ({"timeout": 60}, True):
            stream = client.stream("prompt", **options)
            assert await anext(stream) == ANSWER[0]
            now[0] += 1000.0
            if cut:
                with pytest.raises(StreamInterrupted, match="deadline"):
                    await anext(stream)
            else:
                assert [piece async for piece in stream] == ANSWER[1:]


@pytest.mark.parametrize(
    ("said", "joules"),
    [("0.125", 0.125), ("1e-3", 0.001), ("0", None), ("-1", None), ("nan", None), ("1e9", None), ("much", None)],
)
async def test_an_embedding_has_its_tokens_the_time_of_the_npu_and_joules_if_they_can_be_true(
    scripted, client, said, joules
):
    async def emulated(_):
        costs = {"X-NPU-Node-Token-Count": "7", "X-NPU-Busy-Delta-Us": "9", "X-NPU-Emulated": "true"}
        head = {"X-Shape": "1,8", "X-Space": "space-a", "X-NPU-Node-Joules": said, **costs}
        return web.Response(body=np.ones(8, "<f4").tobytes(), headers=head)

    scripted.respond = emulated
    result = await client.embed_result("text")
    assert (result.usage.prompt_tokens, result.npu_busy_delta_us, result.emulated) == (7, 9, True)
    assert result.joules == joules


async def test_a_stream_names_its_joules_at_the_end_and_the_ledger_has_the_sum(scripted, client):
    async with InferenceClient(client) as calls:
        for joules in (0.5, 0.25, None):
            done = sse("token", {"text": "Paris"}) + sse("done", done_event() | {"joules": joules})
            scripted.respond = answering(partial(streamed, done, done=False))
            async with calls.stream("prompt") as stream:
                assert [piece async for piece in stream] == ["Paris"]
            assert stream.result.joules == joules
        assert calls.ledger.local.joules == 0.75


async def large_texts_refused(request):
    """As a node does that limits the size of a request: its sum, so that halves may pass."""
    size = sum(map(len, (await request.json())["texts"]))
    return error_response(413, "payload_too_large") if size > 1000 else None


async def test_the_good_half_of_a_batch_that_is_too_large_is_kept(scripted, client):
    scripted.respond = large_texts_refused
    texts = [f"text {index}" for index in range(40)]
    texts[30] = "x" * 1001
    with pytest.raises(EmbedManyFailed) as caught:
        await client.embed_many(texts)
    [failure] = caught.value.failures
    assert (failure.start, failure.stop, type(failure.error)) == (30, 31, PayloadTooLarge)
    good = [*range(30), *range(31, 40)]
    np.testing.assert_array_equal(caught.value.vectors[good], vectors_for([texts[row] for row in good]))


async def test_generate_and_stream_give_the_same(scripted, client):
    result = await client.generate("prompt", max_new_tokens=9, stop=["x"])
    assert result.text == "".join(ANSWER)
    stream = client.stream("prompt", max_new_tokens=9, stop=["x"])
    assert [piece async for piece in stream] == ANSWER
    assert stream.result.text == result.text
    assert (stream.result.usage, stream.result.timing) == (result.usage, result.timing)
    # Both are streamed, so that a hung engine is told from a long answer.
    body = {"prompt": "prompt", "max_new_tokens": 9, "stop": ["x"], "model": WRITER, "stream": True}
    assert scripted.bodies == [body, body]


async def test_an_error_event_in_a_stream_is_typed(scripted, client):
    error = {"message": "the engine died", "type": "server_error", "code": "engine_unavailable", "param": None}
    events = sse("token", {"text": "Par"}), sse("error", {"error": error})
    scripted.respond = answering(lambda: streamed(*events, done=False))
    with pytest.raises(StreamInterrupted, match="engine of the model died") as caught:
        [piece async for piece in client.stream("prompt")]
    assert caught.value.partial_text == "Par"
    assert caught.value.attempts[-1].code == "engine_unavailable"


async def test_unknown_events_of_a_newer_node_are_ignored(scripted, client):
    events = (
        b"event: progress\ndata: 12%\n\ndata: {}\n\n" + sse("reasoning", {"text": "Hm."}),
        sse("token", {"text": "Par", "probability": 1}) + sse("device", ["NPU"]),
        sse("token", {"text": "is"}) + sse("done", done_event()),
    )
    scripted.respond = answering(lambda: streamed(*events, done=False))
    stream = client.stream("prompt")
    assert [piece async for piece in stream] == ["Par", "is"]
    assert stream.result.finish_reason == "stop"


async def test_the_device_at_the_end_of_a_stream_counts(scripted, client):
    # Its head names the CPU.
    scripted.respond = streaming(sse("token", {"text": "Paris"}) + sse("done", done_event() | {"device": "GPU"}))
    assert (await client.generate("prompt")).device == "GPU"
    with pytest.raises(NPUUnavailableError, match="CPU was required, and the answer names another device"):
        await client.generate("prompt", require_device="CPU", timeout=20)


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "context_length_exceeded", ContextLengthExceeded),
        (401, "invalid_api_key", AuthenticationFailed),
        (422, "invalid_request", RequestRejected),
        (500, "internal_error", NPUUnavailableError),
        (503, "npu_unavailable", NPUUnavailableError),
        (302, "found", NPUUnavailableError),
        (204, "empty", NPUUnavailableError),
    ],
)
async def test_each_status_has_its_error(scripted, client, status, code, error):
    async def answer(_):
        if status == 204:
            return web.Response(status=204)
        return error_response(status, code, "as the node says", retry_after_ms=60_000)

    scripted.respond = answer
    with pytest.raises(error) as caught:
        await client.embed("text")
    if status not in {204, 302}:
        assert code in str(caught.value)
    assert "as the node says" not in str(caught.value)
    assert caught.value.attempts[-1].status == status
    assert caught.value.request_id == scripted.requests[0].headers["X-Request-ID"]


async def test_a_node_that_takes_no_connection_is_unreachable_all_the_same():
    options = ClientOptions(timeouts=Timeouts(connect=0.2))
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        # Fill its backlog, so that the kernel answers no further connection.
        for _ in range(4):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(deaf.getsockname())
        async with NPUClient([f"http://127.0.0.1:{deaf.getsockname()[1]}"], options=options) as client:
            with pytest.raises(NPUUnavailableError, match="cannot connect: no answer in time"):
                await client.embed("text", timeout=30)
