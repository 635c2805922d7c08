"""Reranking over real sockets, and what both further tasks share: typed results, faults, nodes that offer neither."""

import pickle

import pytest

import backend_client
from backend_client import (
    CloudClient,
    CloudSettings,
    InferenceClient,
    InvalidArgument,
    NPUUnavailableError,
)
from backend_client.errors import NotOffered
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
    assert [(document.index, document.text) for document in result.documents] == [
        (1, DOCUMENTS[1]),
        (2, DOCUMENTS[2]),
        (0, DOCUMENTS[0]),
    ]
    assert result.documents[0].score == 1.0
    assert (result.model, result.device, result.request_id, result.usage.prompt_tokens) == (
        "fake-reranker",
        "CPU",
        "mine",
        16,
    )
    sent = fleet.assert_sent("/v1/rerank", times=1, query="capital of France", documents=DOCUMENTS)
    assert (sent.body["model"], sent.body["max_tokens_per_doc"]) == ("fake-reranker", 64)
    assert "France" not in repr(result)
    assert pickle.loads(pickle.dumps(result)) == result  # noqa: S301


@pytest.mark.parametrize(
    ("arguments", "options", "param"),
    [
        (("q", "one text"), {}, "documents"),
        (("q", []), {}, "documents"),
        (("q", [1]), {}, "documents"),
        (("q", {"a"}), {}, "documents"),
        ((b"q", ["a"]), {}, "query"),
        (("q", ["a"]), {"top_n": 0}, "top_n"),
        (("q", ["a"]), {"top_k": 1}, "top_k"),
    ],
)
async def test_a_wrong_ranking_is_refused_before_it_is_sent(client, fleet, arguments, options, param):
    with pytest.raises(InvalidArgument) as caught:
        await client.rerank(*arguments, **options)
    assert caught.value.param == param
    fleet.assert_nothing_sent()


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
