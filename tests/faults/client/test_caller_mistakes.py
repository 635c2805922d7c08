"""What a caller gets wrong is reported before anything is sent, and never counts against a node."""

import asyncio

import numpy as np
import pytest

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
from backend_client.fleet.breaker import BreakerState

DEAD = "http://127.0.0.1:1"


@pytest.fixture
async def client(scripted):
    async with NPUClient([scripted.url]) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "argument", "options", "message"),
    [
        ("generate", "p", {"stream": True}, r"call stream\(prompt\)"),
        ("generate", "p", {"temprature": 0.5}, "did you mean temperature"),
        ("generate", "p", {"max_new_tokens": "5"}, "max_new_tokens must be a valid integer"),
        ("generate", "p", {"temperature": float("nan")}, "temperature must be a finite number"),
        ("generate", "p", {"stop": ["a", 5]}, "stop must be"),
        ("generate", ["p"], {}, "prompt must be a str, got list"),
        ("embed", "t", {"priority": "urgent"}, "priority must be 'interactive' or 'batch'"),
        ("embed", "t", {"require_device": "npu"}, "require_device must be 'NPU', 'GPU' or 'CPU'"),
        ("embed", "t", {"timeout": float("inf")}, "timeout must be a finite number"),
        ("embed", "t", {"model": ""}, "model must be a name"),
        ("embed", ["t"], {}, "text must be a str, got list"),
        ("embed", "\ud800", {}, "not Unicode"),
        ("embed", "a", {"model": "\ud800"}, "model"),
        ("generate", "a", {"stop": ["\ud800"]}, "stop"),
        ("embed_many", "hello", {}, "texts must be a list of texts, got str; for one text call embed"),
        ("embed", "t", {"model": "a\nb"}, "model must be a name"),
        ("embed_many", {"a": 1}, {}, "texts must be a list of texts, got dict"),
        ("embed_many", np.array("scalar"), {}, "texts must be a list of texts, got ndarray"),
        ("embed_many", ["a", None], {}, r"texts\[1\] must be a str, got NoneType"),
        ("embed_many", ["a", "\ud800"], {}, r"texts\[1\] is not Unicode"),
        ("embed_many", ["a"], {"progress": asyncio.sleep}, "progress must be a plain function"),
    ],
)
async def test_a_wrong_argument_is_named_and_nothing_is_sent(scripted, client, method, argument, options, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        await getattr(client, method)(argument, **options)
    assert isinstance(caught.value, RequestRejected | ValueError)
    assert caught.value.param in {*options, "text", "texts", "prompt"}
    assert not scripted.requests
    assert all(status.breaker is BreakerState.CLOSED for status in client.status())


async def texts_as_they_come():
    for text in ("a", "b"):
        yield text


async def test_texts_may_come_asynchronously_but_not_for_one_request(scripted, client):
    with pytest.raises(InvalidArgument, match="call embed_many or embed_stream"):
        await client.embed_batch(texts_as_they_come())
    assert (await client.embed_many(texts_as_they_come())).shape == (2, 8)
    assert [len(batch.vectors) async for batch in client.embed_stream(texts_as_they_come())] == [2]
    with pytest.raises(InvalidArgument, match="for one text"):
        [_ async for _ in client.embed_stream("hello")]
    with pytest.raises(InvalidArgument, match=r"texts\[1\] must be a str"):
        [_ async for _ in client.embed_stream(["a", 1])]


async def test_a_stream_reports_a_wrong_option_at_the_call(client):
    with pytest.raises(InvalidArgument, match="did you mean max_new_tokens"):
        client.stream("p", max_new_token=5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NPUClient("http://10.0.0.1:8081"), "nodes must be a list"),
        (lambda: NPUClient([None]), "nodes must be a list"),
        (lambda: NPUClient(["10.0.0.1"]), "http://host:port"),
        (lambda: NPUClient([DEAD], api_key=5), "api_key must be a str, got int"),
        (lambda: NPUClient([DEAD], api_key="sk-hunter2\n"), "line end"),
        (lambda: NPUClient([DEAD], spaces=["m"]), "spaces must map names"),
        (lambda: NPUClient([DEAD], options={"timeouts": 5}), "options must be"),
        (lambda: sync.NPUClient("http://10.0.0.1:8081"), "nodes must be a list"),
        (lambda: InferenceClient(DEAD), "takes an NPUClient"),
        (lambda: InferenceClient(NPUClient([DEAD]), CloudSettings(api_key="k")), "a CloudClient"),
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
            with pytest.raises(InvalidArgument):
                calls.stream("prompt", temprature=1)
    assert not cloud.requests
