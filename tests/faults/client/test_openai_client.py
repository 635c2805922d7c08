"""The OpenAI SDK, unmodified, over a fleet of scripted nodes."""

import asyncio

import openai as sdk
import pytest

import backend_client
from backend_client import ClientSettings, sync
from backend_client.testing import FakeFleet, cut, drop, status
from tests.faults.scripted_node import (
    ANSWER,
    EMBEDDER,
    TOOL,
    WRITER,
    ScriptedNode,
    answering,
    error_response,
    served_in_thread,
    vectors_for,
)

QUESTION = [{"role": "user", "content": "Where?"}]
TEXT = "".join(ANSWER)


@pytest.fixture
async def openai(pair):
    async with backend_client.openai(ClientSettings(nodes=[node.url for node in pair])) as client:
        yield client


async def test_a_chat_streamed_or_not_is_what_the_sdk_expects(openai):
    reply = await openai.chat.completions.create(model=WRITER, messages=QUESTION)
    assert (reply.choices[0].message.content, reply.usage.completion_tokens) == (TEXT, len(ANSWER))
    stream = await openai.chat.completions.create(model=WRITER, messages=QUESTION, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    # The usage is asked of the node always, and shown to those who asked.
    asked = {"include_usage": True}
    stream = await openai.chat.completions.create(model=WRITER, messages=QUESTION, stream=True, stream_options=asked)
    assert [chunk.usage.prompt_tokens async for chunk in stream if chunk.usage] == [4]


async def test_tools_and_headers_pass(openai, pair):
    raw = await openai.chat.completions.with_raw_response.create(
        model=WRITER, messages=QUESTION, tools=[TOOL], extra_headers={"X-Request-ID": "mine"}
    )
    assert raw.parse().choices[0].message.tool_calls[0].function.name == "weather"
    assert (raw.headers["x-request-id"], raw.headers["x-npu-node-device"]) == ("mine", "CPU")
    [request] = [request for node in pair for request in node.requests]
    assert request.headers["X-Request-ID"] == "mine"
    assert "Authorization" not in request.headers


async def test_embeddings_are_those_of_the_node(openai):
    reply = await openai.embeddings.create(model=EMBEDDER, input=["one", "two"])
    assert [row.embedding for row in reply.data] == vectors_for(["one", "two"]).tolist()
    plain = await openai.embeddings.create(model=EMBEDDER, input="one", encoding_format="float")
    assert plain.data[0].embedding == reply.data[0].embedding


async def test_the_models_are_those_of_all_nodes(openai):
    assert sorted([model.id async for model in openai.models.list()]) == [EMBEDDER, WRITER]
    assert (await openai.models.retrieve(WRITER)).id == WRITER
    with pytest.raises(sdk.NotFoundError):
        await openai.models.retrieve("nothing")


async def test_refusals_and_failures_are_the_sdks_errors(openai, pair):
    for node in pair:
        node.respond = answering(lambda: error_response(400, "unsupported_parameter", "top_k: not on this device"))
    with pytest.raises(sdk.BadRequestError, match="top_k: not on this device") as caught:
        await openai.chat.completions.create(model=WRITER, messages=QUESTION)
    assert caught.value.code == "unsupported_parameter"
    assert sum(len(node.bodies) for node in pair) == 1

    for node in pair:
        node.respond = answering(lambda: error_response(429, "overloaded", retry_after_ms=60_000))
    with pytest.raises(sdk.RateLimitError) as caught:
        await openai.chat.completions.create(model=WRITER, messages=QUESTION, timeout=5)
    assert int(caught.value.response.headers["retry-after-ms"]) > 1000

    for node in pair:
        node.respond = answering(lambda: error_response(404, "model_not_found"))
    with pytest.raises(sdk.NotFoundError):
        await openai.chat.completions.create(model="nothing", messages=QUESTION)
    with pytest.raises(sdk.NotFoundError, match="serves no"):
        await openai.files.retrieve("f")


async def test_a_stream_that_breaks_off_is_not_repeated(openai, pair):
    for node in pair:
        node.script(cut(2))
    stream = await openai.chat.completions.create(model=WRITER, messages=QUESTION, stream=True)
    seen = []
    with pytest.raises(sdk.APIError, match="stopped after") as caught:
        async for chunk in stream:
            seen += [chunk.choices[0].delta.content]
    assert "".join(seen) == "".join(ANSWER[:2])
    assert caught.value.code == "stream_interrupted"
    assert sum(len(node.bodies) for node in pair) == 1


async def test_the_time_of_a_call_is_the_sdks(openai, pair):
    async def never(_):
        await asyncio.get_running_loop().create_future()

    for node in pair:
        node.respond = never
    with pytest.raises(sdk.APITimeoutError):
        await openai.chat.completions.create(model=WRITER, messages=QUESTION, timeout=0.3)


async def test_the_cloud_serves_what_no_node_can(pair, cloud):
    for node in pair:
        node.respond = answering(lambda: error_response(503, "engine_unavailable"))
    settings = ClientSettings(
        nodes=[node.url for node in pair], cloud={"api_key": "k", "base_url": cloud.url, "chat_model": "chat"}
    )
    async with backend_client.openai(settings) as openai:
        await openai.models.list()
        call = {"model": WRITER, "messages": QUESTION, "timeout": 4}
        with pytest.raises(sdk.InternalServerError, match="chat_models"):
            await openai.chat.completions.create(**call)
    settings = settings.model_copy(
        update={"cloud": settings.cloud.model_copy(update={"chat_models": {WRITER: "cloud-chat"}})}
    )
    async with backend_client.openai(settings) as openai:
        reply = await openai.chat.completions.create(**call)
        assert (reply.choices[0].message.content, reply.model) == (TEXT, "cloud-chat")
        stream = await openai.chat.completions.create(**call, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == TEXT


def test_the_blocking_sdk_does_the_same():
    with served_in_thread(ScriptedNode()) as url, sync.openai(ClientSettings(nodes=[url])) as openai:
        reply = openai.chat.completions.create(model=WRITER, messages=QUESTION)
        assert reply.choices[0].message.content == TEXT
        stream = openai.chat.completions.create(model=WRITER, messages=QUESTION, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == TEXT
        assert openai.embeddings.create(model=EMBEDDER, input="one").data[0].embedding


@pytest.mark.parametrize("size", [9, 3_000_000])
def test_an_upload_through_the_sdk_reaches_a_node_and_the_next_where_one_fails(size):
    recording = (b"RIFF\r\n--not-a-boundary\r\n\x00\xff" * (size // 9))[:size]
    with FakeFleet(2) as fleet, sync.openai(fleet.settings()) as client:
        fleet[0].script(drop(), status(500))
        for _ in range(2):
            reply = client.audio.transcriptions.create(
                model="fake-listener",
                file=("a.wav", recording),
                language="en",
                response_format="verbose_json",
                timestamp_granularities=["word", "segment"],
                timeout=20,
            )
            assert reply.text == fleet[0].transcript
        sent = fleet.sent("/v1/audio/transcriptions")
        assert {request.body["file"] for request in sent} == {recording}
        fields = {"model": "fake-listener", "language": "en", "timestamp_granularities[]": ["word", "segment"]}
        assert all(request.body.items() >= fields.items() for request in sent)


def test_an_upload_streams_and_only_what_fails_before_its_first_event_is_sent_again():
    upload = {"model": "fake-listener", "file": ("a.wav", b"RIFF"), "stream": True, "timeout": 20}
    with FakeFleet(2) as fleet, sync.openai(fleet.settings()) as client:
        words = [word + " " for word in fleet[0].transcript.split()]

        def deltas(stream):
            return [event.delta for event in stream if event.type == "transcript.text.delta"]

        assert "".join(deltas(client.audio.transcriptions.create(**upload))) == fleet[0].transcript
        assert len(fleet.sent("/v1/audio/transcriptions")) == 1
        for node in fleet:
            node.script(drop() if node is fleet[0] else status(500), None)
        *parts, last = client.audio.transcriptions.create(**upload)
        assert (len(parts), last.text) == (len(words), fleet[0].transcript)
        for node in fleet:
            node.clear()
            node.script(cut(2))
        before, heard = len(fleet.sent("/v1/audio/transcriptions")), []
        with pytest.raises(sdk.APIError) as broken:
            for event in client.audio.transcriptions.create(**upload):
                heard.append(event.delta)  # noqa: PERF401  (what came before the error counts)
        assert broken.value.code == "stream_interrupted"
        # The words came one by one, before anything was known of the end. The second one is lost where the connection
        # is reset before this thread takes it.
        assert heard in (words[:1], words[:2])
        assert len(fleet.sent("/v1/audio/transcriptions")) == before + 1
        assert client.audio.transcriptions.create(**upload | {"stream": False}).text == fleet[0].transcript


async def test_a_closed_sdk_raises_its_own_errors(pair):
    openai = backend_client.openai(ClientSettings(nodes=[node.url for node in pair]))
    stream = await openai.chat.completions.create(model=WRITER, messages=QUESTION, stream=True)
    await anext(stream)
    await openai.close()
    with pytest.raises(sdk.OpenAIError, match="closed"):
        [chunk async for chunk in stream]
    # What any client of the SDK raises then.
    with pytest.raises(RuntimeError, match="closed"):
        await openai.embeddings.create(model=EMBEDDER, input="text")
