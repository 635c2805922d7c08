"""What must stay on the premises, and whose headers go where: through methods and the OpenAI SDK."""

import openai as sdk
import pytest

import backend_client
from backend_client import (
    ClientSettings,
    CloudClient,
    CloudSettings,
    InferenceClient,
    InvalidArgument,
    NPUClient,
    NPUUnavailableError,
)
from backend_client.errors import CloudRejected
from tests.faults.scripted_node import WRITER, answering, error_response

DEAD = "http://127.0.0.1:1"
QUESTION = [{"role": "user", "content": "Where?"}]


def settings(cloud, nodes=(DEAD,), **more):
    mapped = {"chat_model": "chat", "chat_models": {WRITER: "chat"}, "embedding_models": {"space-a": "embedder"}}
    return ClientSettings(nodes=list(nodes), cloud={"api_key": "k", "base_url": cloud.url, **mapped, **more})


@pytest.fixture
async def openai(cloud):
    """The SDK over a fleet that is down and a cloud that answers."""
    async with backend_client.openai(settings(cloud)) as client:
        reply = await client.chat.completions.create(model=WRITER, messages=QUESTION)
        assert reply.model == "chat"
        cloud.requests.clear()
        yield client


@pytest.mark.parametrize("device", [" npu ", "NPU.0", "NPU,GPU", "AUTO", ""])
async def test_a_required_device_never_means_the_cloud(openai, cloud, device):
    known = device.strip().upper() in {"NPU", "GPU", "CPU"}
    error = sdk.InternalServerError if known else sdk.BadRequestError
    match = "requires the device" if known else "X-NPU-Require-Device must be NPU or GPU or CPU"
    headers = {"X-NPU-Require-Device": device}
    for client, more in ((openai, {"extra_headers": headers}), (openai.with_options(default_headers=headers), {})):
        for stream in (False, True):
            with pytest.raises(error, match=match):
                await client.chat.completions.create(model=WRITER, messages=QUESTION, stream=stream, **more)
    with pytest.raises(error, match=match):
        await openai.embeddings.create(model="m", input="text", extra_headers=headers)
    assert not cloud.requests


LOCAL = [
    {"extra_headers": {"X-NPU-Local-Only": "true"}},
    {"extra_headers": {"x-npu-local-only": "1"}},
    {"extra_body": {"local_only": True}},
    {"extra_body": {"local_only": "true"}},
    {"extra_headers": {"X-NPU-Local-Only": "true"}, "extra_body": {"local_only": False}},
]


@pytest.mark.parametrize("options", LOCAL)
async def test_one_call_of_the_sdk_can_say_that_it_stays(openai, cloud, options):
    for stream in (False, True):
        with pytest.raises(sdk.InternalServerError, match="local_only is set"):
            await openai.chat.completions.create(model=WRITER, messages=QUESTION, stream=stream, **options)
    with pytest.raises(sdk.InternalServerError, match="local_only is set"):
        await openai.embeddings.create(model="m", input="text", **options)
    assert not cloud.requests
    no = {"extra_headers": {"X-NPU-Local-Only": "false"}, "extra_body": {"local_only": False}}
    assert (await openai.chat.completions.create(model=WRITER, messages=QUESTION, **no)).model == "chat"


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({"extra_body": {"require_device": "cpu"}}, True),
        ({"extra_body": {"require_device": "NPU"}}, False),
        ({"extra_body": {"require_device": "NPU"}, "extra_headers": {"X-NPU-Require-Device": "CPU"}}, False),
        ({"extra_headers": {"X-NPU-Require-Device": "NPU"}}, False),
    ],
)
async def test_a_device_that_the_sdk_requires_is_kept_to(pair, cloud, options, served):
    async with backend_client.openai(settings(cloud, [node.url for node in pair])) as openai:
        call = openai.chat.completions.create(model=WRITER, messages=QUESTION, **options)
        if served:
            await call
        else:
            with pytest.raises(sdk.APIError, match="NPU"):
                await call
    sent = [node for node in pair if node.bodies]
    assert len(sent) == served
    for node in sent:
        assert "require_device" not in node.bodies[0]
        assert node.requests[0].headers["X-NPU-Require-Device"] == "CPU"
    assert not cloud.requests


FIELDS = {
    "local_only": True,
    "Local-Only": True,
    "require_device": "NPU",
    "extra_body": {"local_only": True},
    "extra_headers": {"X-A": "b"},
    "extra_query": {"a": "b"},
}


@pytest.mark.parametrize("name", FIELDS)
async def test_an_option_among_the_fields_of_a_body_is_never_lost(openai, cloud, name):
    field = {name: FIELDS[name]}
    async with NPUClient([DEAD]) as npu:
        with pytest.raises(InvalidArgument, match=f"the body has {name}") as caught:
            await npu.post("/v1/chat/completions", {"messages": QUESTION, **field})
        assert caught.value.param == name.lower().replace("-", "_")
        if name.startswith("extra_"):
            with pytest.raises(sdk.BadRequestError, match=f"the body has {name}"):
                await openai.chat.completions.create(model=WRITER, messages=QUESTION, extra_body=field)
    assert not cloud.requests


async def test_embeddings_of_post_stay_with_the_nodes_and_the_error_names_the_calls_that_do_not(cloud):
    async with InferenceClient.from_settings(settings(cloud)) as client:
        with pytest.raises(NPUUnavailableError, match="texts without other fields only: call embed or embed_many"):
            await client.post("/v1/embeddings", {"input": "a", "dimensions": 4})
    assert not cloud.requests


async def test_headers_of_a_call_go_to_nodes_and_to_the_cloud_where_they_are_listed(pair, cloud):
    headers = {"X-Tenant": "a", "X-Trace": "b", "Authorization": "Bearer caller", "Cookie": "c=d"}
    node = pair[0]
    configured = settings(cloud, [node.url], extra_headers=["x-tenant"])
    async with InferenceClient.from_settings(configured) as client:
        assert (await client.chat(QUESTION, extra_headers=headers)).source == "node"
        assert {name: node.requests[0].headers[name] for name in headers} == headers

        assert (await client.embed_result("text")).source == "node"
        node.respond = answering(lambda: error_response(503, "draining", retry_after_ms=60_000))
        cloud.requests.clear()
        assert (await client.chat(QUESTION, extra_headers=headers)).source == "cloud"
        assert (await client.generate("Where?", extra_headers=headers)).source == "cloud"
        assert (await client.embed_result("text", extra_headers=headers)).source == "cloud"
        stream = client.stream("Where?", extra_headers=headers)
        assert [piece async for piece in stream]
    assert len(cloud.requests) == 4
    for request in cloud.requests:
        assert request.headers["X-Tenant"] == "a"
        assert request.headers["Authorization"] == "Bearer k"
        assert not {"X-Trace", "Cookie"} & set(request.headers)


async def test_a_cloud_asked_directly_keeps_to_it(cloud):
    async with CloudClient(CloudSettings(api_key="k", base_url=cloud.url, chat_model="chat")) as client:
        for options in ({"local_only": True}, {"require_device": "NPU"}):
            for call in (lambda more: client.generate("Where?", **more), lambda more: client.chat(QUESTION, **more)):
                with pytest.raises(CloudRejected):
                    await call(options)
    assert not cloud.requests


@pytest.mark.parametrize("field", ["guided_json", "guided_regex", "guided_choice", "structured_outputs"])
async def test_a_form_that_only_nodes_hold_never_means_the_cloud(cloud, field):
    body = {"messages": QUESTION, "model": WRITER, field: "a+"}
    async with InferenceClient.from_settings(settings(cloud)) as client:
        with pytest.raises(NPUUnavailableError, match=f"only nodes hold an answer to {field}"):
            await client.post("/v1/chat/completions", body)
    assert not cloud.requests
