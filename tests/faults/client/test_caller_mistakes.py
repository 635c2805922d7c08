"""What a caller gets wrong is reported before anything is sent, and never counts against a node."""

import asyncio
import io
import json

import openai as openai_sdk
import pytest

import backend_client
from backend_client import (
    ClientSettings,
    CloudClient,
    CloudSettings,
    ConfigurationError,
    InferenceClient,
    InvalidArgument,
    NPUClient,
    RequestRejected,
    sync,
)
from backend_client.fleet.node import BreakerState

DEAD = "http://127.0.0.1:1"
QUESTION = [{"role": "user", "content": "Where?"}]


@pytest.mark.parametrize(
    ("method", "argument", "options", "message"),
    [
        ("generate", "p", {"stream": True}, r"call stream\(prompt\)"),
        ("generate", "p", {"temprature": 0.5}, "did you mean temperature"),
        ("generate", "p", {"max_new_tokens": "5"}, "max_new_tokens must be a valid integer"),
        ("generate", "p", {"stop": ["a", 5]}, "stop must be"),
        ("generate", ["p"], {}, "prompt must be a str, got list"),
        ("embed", "t", {"priority": "urgent"}, "priority must be 'interactive' or 'batch'"),
        ("embed", "t", {"require_device": "npu"}, "require_device must be 'NPU', 'GPU' or 'CPU'"),
        ("embed", "t", {"timeout": float("inf")}, "timeout must be a finite number"),
        ("embed", "t", {"model": ""}, "model must be a name"),
        ("embed", ["t"], {}, "text must be a str, got list"),
        ("embed", "\ud800", {}, "not Unicode"),
        ("generate", "a", {"stop": ["\ud800"]}, "stop"),
        ("embed_many", "hello", {}, "texts must be a list of texts, got str; for one text call embed"),
        ("embed_many", ["a", None], {}, r"texts\[1\] must be a str, got NoneType"),
        ("chat", "Where?", {}, "call generate"),
        ("chat", [], {}, "empty"),
        ("chat", [{"content": "no role"}], {}, r"messages\[0\]"),
        ("chat", QUESTION, {"tools": {}}, "list"),
        ("post", "/v1/embeddings", {"body": {"input": "a", 5: 6}}, "body's fields must be str, got int"),
        ("chat", QUESTION, {"extra_headers": {"X-A": "two\nlines"}}, "extra_headers"),
        ("chat", QUESTION, {"request_id": "with space"}, "request_id"),
        ("embed_many", ["a"], {"progress": asyncio.sleep}, "progress must be a plain function"),
        ("rerank", "q", {"documents": []}, "documents"),
        ("rerank", "q", {"documents": {"a"}}, "documents"),
        ("rerank", b"q", {"documents": ["a"]}, "query"),
        ("rerank", "q", {"documents": ["a"], "top_n": 0}, "top_n"),
        ("rerank", "q", {"documents": ["a"], "top_k": 1}, "top_k"),
        ("transcribe", None, {}, "NoneType"),
        ("transcribe", b"", {}, "empty"),
        ("transcribe", "/no/such/file.wav", {}, "No such file"),
        ("transcribe", "/", {}, "directory"),
        ("transcribe", "a\0b", {}, "valid path"),
        ("transcribe", io.StringIO("text"), {}, "binary"),
    ],
)
async def test_a_wrong_argument_is_named_and_nothing_is_sent(pair, client, method, argument, options, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        await getattr(client, method)(argument, **options)
    assert isinstance(caught.value, RequestRejected | ValueError)
    assert caught.value.param in {*options, "text", "texts", "prompt", "messages", "query", "audio"}
    assert not pair[0].requests + pair[1].requests
    assert all(status.breaker is BreakerState.CLOSED for status in client.status())


async def texts_as_they_come():
    for text in ("a", "b"):
        yield text


async def test_texts_may_come_asynchronously_but_not_for_one_request(client):
    with pytest.raises(InvalidArgument, match="call embed_many or embed_stream"):
        await client.embed_batch(texts_as_they_come())
    assert (await client.embed_many(texts_as_they_come())).shape == (2, 8)
    assert [len(batch.vectors) async for batch in client.embed_stream(texts_as_they_come())] == [2]
    with pytest.raises(InvalidArgument, match="for one text"):
        [_ async for _ in client.embed_stream("hello")]
    with pytest.raises(InvalidArgument, match=r"texts\[1\] must be a str"):
        [_ async for _ in client.embed_stream(["a", 1])]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NPUClient("http://10.0.0.1:8081"), "nodes must be a list"),
        (lambda: NPUClient([]), "at least one URL"),
        (lambda: NPUClient(["10.0.0.1"]), "http://host:port"),
        (lambda: NPUClient([DEAD], api_key=5), "api_key must be a str, got int"),
        (lambda: NPUClient([DEAD], api_key="sk-hunter2\n"), "line end"),
        (lambda: NPUClient([DEAD], spaces=["m"]), "spaces must map names"),
        (lambda: NPUClient([DEAD], options={"timeouts": 5}), "options must be"),
        (lambda: sync.NPUClient("http://10.0.0.1:8081"), "nodes must be a list"),
        (lambda: InferenceClient(DEAD), "takes an NPUClient"),
        (lambda: ClientSettings.load(api_key="sk-hunter2\n"), "line end"),
        (lambda: ClientSettings.load(cloud={"api_key": "sk-hunter2\n"}), "line end"),
    ],
)
def test_a_client_that_is_built_wrongly_says_so_at_once(build, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        build()
    assert "nter2" not in str(caught.value)


async def test_the_cloud_is_not_billed_for_a_misspelt_option(cloud):
    settings = CloudSettings(base_url=cloud.url, api_key="sk-cloud", chat_model="m")
    async with InferenceClient(NPUClient([DEAD]), CloudClient(settings)) as client, CloudClient(settings) as direct:
        for calls in (client, direct):
            with pytest.raises(InvalidArgument):
                await calls.generate("prompt", stream=True)
            with pytest.raises(InvalidArgument, match="did you mean temperature"):
                calls.stream("prompt", temprature=1)
    assert not cloud.requests


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("X-Request-ID", "give the option request_id"),
        ("X-Request-Timeout-Ms", "give the option timeout"),
        ("x-priority", "give the option priority"),
        ("X-NPU-Require-Device", "give the option require_device"),
        ("X-NPU-Local-Only", "give the option local_only"),
        *((name, name.lower()) for name in ("Host", "Content-Length", "Connection", "X-NPU-Engine-Deaths")),
    ],
)
async def test_a_header_that_the_client_sets_itself_is_refused(fleet, header, says):
    async with fleet.async_client() as client:
        for call in (client.embed, client.generate):
            with pytest.raises(InvalidArgument, match=says):
                await call("text", extra_headers={header: "3"})
        with pytest.raises(InvalidArgument):
            client.with_options(extra_headers={header: "3"})
    fleet.assert_nothing_sent()


@pytest.mark.parametrize("url", ["", "api.example.org/v1", "ftp://example.org", "https://"])
def test_the_clouds_address_is_one(url):
    # An empty one would mean OpenAI: a variable without a value must not decide where prompts go.
    with pytest.raises(ValueError, match="https://host/v1"):
        CloudSettings(api_key="k", base_url=url)


def test_no_password_of_a_proxy_and_no_key_in_a_query_is_shown(monkeypatch):
    monkeypatch.setenv("NPU_CLIENT_PROXY", "http://user:hunter2@proxy:3128")
    settings = ClientSettings.load(nodes=[DEAD])
    assert settings.proxy.get_secret_value().startswith("http://user:hunter2@")
    client = NPUClient.from_settings(settings)
    for shown in (repr(settings), str(settings.model_dump()), repr(client), repr(client.fleet)):
        assert "hunter2" not in shown
    for url in ("https://host/v1?api_key=hunter2", "https://user:hunter2@host/v1", "https://host/v1#hunter2"):
        with pytest.raises(ConfigurationError, match=r"cloud.*(query|password)") as caught:
            ClientSettings.load(cloud={"api_key": "k", "base_url": url})
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        ClientSettings.load(nodes=["http://host:8081/?api_key=hunter2"])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["Authorization", "cookie", "Proxy-Authorization"])
def test_credentials_of_callers_cannot_be_listed_for_the_cloud(name):
    with pytest.raises(ConfigurationError, match="must not go to the cloud"):
        ClientSettings.load(cloud={"api_key": "k", "extra_headers": ["X-Tenant", name]})


NUMBERS = [
    ("/v1/chat/completions", "max_tokens", [0, -1, 1.0, "5", True, float("inf"), float("nan")]),
    ("/v1/chat/completions", "max_completion_tokens", [0]),
    ("/v1/chat/completions", "n", [0, [2]]),
    ("/v1/chat/completions", "temperature", [float("nan"), float("inf")]),
    ("/v1/completions", "max_tokens", [0]),
    ("/v1/responses", "max_output_tokens", [0]),
    ("/v1/embeddings", "dimensions", [0]),
    ("/v1/rerank", "top_n", [0]),
]
BODIES = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["a"]},
}


@pytest.mark.parametrize(("path", "field", "values"), NUMBERS)
async def test_a_number_that_could_lift_a_limit_is_refused_before_anything_is_sent(fleet, path, field, values):
    async with fleet.async_client() as client, backend_client.openai(fleet.settings()) as openai:
        for value in values:
            body = {**BODIES[path], field: value}
            with pytest.raises(InvalidArgument, match=f"{field} must be|JSON") as caught:
                await client.post(path, body)
            assert caught.value.param in {field, None}
            content = json.dumps({"model": "any", **body}).encode()
            headers = {"Content-Type": "application/json"}
            with pytest.raises(openai_sdk.BadRequestError):
                await openai.post(
                    path.removeprefix("/v1"), cast_to=object, content=content, options={"headers": headers}
                )
    fleet.assert_nothing_sent()
