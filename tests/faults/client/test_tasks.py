"""Reranking and transcription over real sockets: typed results, faults, what is refused, nodes that offer neither."""

import asyncio
import pickle
import threading

import pytest

import backend_client
from backend_client import CloudClient, CloudSettings, InferenceClient, InvalidArgument, NPUUnavailableError, arguments
from backend_client.errors import DeadlineExceeded, NotOffered
from backend_client.testing import FakeFleet, status

DOCUMENTS = ["Bonn lies on the Rhine", "Paris is the capital of France", "the capital"]
AUDIO = b"RIFF\r\n--not-a-boundary\r\n\x00\xff" * 3


@pytest.fixture
async def client(fleet):
    async with fleet.async_client() as made:
        await made.health()
        yield made


async def test_documents_come_by_their_relevance(client, fleet):
    result = await client.rerank("capital of France", DOCUMENTS, max_tokens_per_doc=64, request_id="mine")
    found = [(document.index, document.text) for document in result.documents]
    assert found == [(index, DOCUMENTS[index]) for index in (1, 2, 0)]
    assert result.documents[0].score == 1.0
    assert (result.model, result.device, result.request_id) == ("fake-reranker", "CPU", "mine")
    assert result.usage.prompt_tokens == 16
    sent = fleet.assert_sent("/v1/rerank", times=1, query="capital of France", documents=DOCUMENTS)
    assert (sent.body["model"], sent.body["max_tokens_per_doc"]) == ("fake-reranker", 64)
    assert "France" not in repr(result)
    assert pickle.loads(pickle.dumps(result)) == result  # noqa: S301


async def test_what_no_node_offers_reaches_none_and_costs_no_time(fleet):
    with FakeFleet(2) as bare:
        for node in bare:
            node.offers = {"embedding", "generation"}
        async with bare.async_client() as client, InferenceClient(bare.async_client()) as inference:
            for made in (client, inference):
                for call in (made.rerank("q", ["a"]), made.transcribe(AUDIO)):
                    with pytest.raises(NotOffered):
                        await call
        bare.assert_nothing_sent()


async def test_the_cloud_is_never_asked_and_the_error_says_so(cloud):
    settings = CloudSettings(base_url=cloud.url, api_key="sk", chat_model="cloud-chat")
    with FakeFleet(2) as failing:
        for node in failing:
            node.script(*[status(500)] * 6)
        async with InferenceClient(failing.async_client(), CloudClient(settings)) as client:
            for path, call in (
                ("/v1/rerank", client.rerank("q", DOCUMENTS, timeout=5)),
                ("/v1/audio/transcriptions", client.transcribe(AUDIO, timeout=5)),
            ):
                with pytest.raises(NPUUnavailableError, match=f"serves chats and embeddings only, and this is {path}"):
                    await call
            for node in failing:
                node.clear()
            assert (await client.rerank("capital of France", DOCUMENTS)).documents[0].index == 1
            assert client.ledger.local.calls == 1
            assert client.ledger.local.prompt_tokens > 0
    assert not cloud.requests


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the SDK's name for translations
async def test_a_translation_and_the_newer_form_of_rerank_go_over_the_fleet(fleet):
    async with backend_client.openai(fleet.settings()) as openai:
        said = await openai.audio.translations.create(
            model="fake-listener", file=("a.wav", AUDIO), response_format="verbose_json"
        )
        path = str(openai.base_url).replace("/v1", "/v2") + "rerank"
        ranked = await openai.post(path, cast_to=object, body={"query": "capital of France", "documents": DOCUMENTS})
    assert said.text == "It is raining in Paris."
    assert [result["index"] for result in ranked["results"]] == [1, 2, 0]
    assert [request.path for request in fleet.requests] == ["/v1/audio/translations", "/v2/rerank"]


@pytest.mark.parametrize("given", [lambda path: path, str, lambda _: AUDIO, lambda _: bytearray(AUDIO), open])
async def test_a_recording_is_a_path_its_bytes_or_a_file(client, fleet, tmp_path, given):
    path = tmp_path / "Ä recording.wav"
    path.write_bytes(AUDIO)
    audio = path.open("rb") if given is open else given(path)
    result = await client.transcribe(audio, language="en", timestamp_granularities=["word", "segment"])
    if given is open:
        audio.close()
    assert (result.text, result.language, result.duration) == ("It is raining in Paris.", "en", 2.5)
    [segment] = result.segments
    assert (segment.start, segment.end, segment.text) == (0.0, 2.5, result.text)
    assert [word.word for word in result.words] == result.text.split()
    assert (result.words[1].start, result.words[1].end) == (0.5, 1.0)
    sent = fleet.assert_sent("/v1/audio/transcriptions", times=1, file=AUDIO, response_format="verbose_json")
    assert sent.body["timestamp_granularities[]"] == ["word", "segment"]
    assert sent.body["model"] == "fake-listener"
    assert "raining" not in repr(result)
    assert pickle.loads(pickle.dumps(result)) == result  # noqa: S301


class Endless:
    """A recording that goes on and on, a byte at a time."""

    def __init__(self):
        self.reading = threading.Event()

    def read(self, _size):
        self.thread = threading.current_thread()
        self.reading.set()
        return b"x"


@pytest.mark.parametrize(("timeout", "error"), [(0.3, DeadlineExceeded), (600, asyncio.CancelledError)])
async def test_a_recording_is_read_no_further_when_the_time_is_up_or_the_caller_has_left(client, timeout, error):
    endless = Endless()
    call = asyncio.create_task(client.transcribe(endless, timeout=timeout))
    await asyncio.to_thread(endless.reading.wait, 60)
    if timeout == 600:
        call.cancel()
    with pytest.raises(error):
        await call
    await asyncio.to_thread(endless.thread.join, 60)
    assert not endless.thread.is_alive()


FORMS = [lambda path: path, lambda path: path.read_bytes(), lambda path: path.open("rb"), lambda _: "/dev/zero"]


@pytest.mark.parametrize("form", FORMS)
async def test_a_recording_that_is_too_large_to_send_is_refused(client, form, monkeypatch, tmp_path):
    monkeypatch.setattr(arguments, "MOST_BYTES", 1000)
    (tmp_path / "long.wav").write_bytes(bytes(1001))
    audio = form(tmp_path / "long.wav")
    try:
        with pytest.raises(InvalidArgument, match="at most 1000 bytes"):
            await client.transcribe(audio)
    finally:
        if hasattr(audio, "close"):
            audio.close()
