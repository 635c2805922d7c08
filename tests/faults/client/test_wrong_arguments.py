"""What a caller may get wrong when a client is made, and in headers: refused at once, and no node suffers for it."""

import json

import openai as openai_sdk
import pytest

import backend_client
from backend_client import (
    ClientSettings,
    CloudSettings,
    ConfigurationError,
    InvalidArgument,
    NPUClient,
)
from backend_client.testing import FakeFleet

NODE = "http://127.0.0.1:1"
QUESTION = [{"role": "user", "content": "Where?"}]


@pytest.fixture
def fleet():
    with FakeFleet(2) as running:
        yield running


@pytest.mark.parametrize(
    "header",
    [
        "Host",
        "Content-Length",
        "transfer-encoding",
        "Connection",
        "Content-Type",
        "Accept",
        "Expect",
        "Proxy-Connection",
    ],
)
async def test_a_header_that_frames_the_request_reaches_no_node(fleet, header):
    async with fleet.async_client() as client:
        for call in (client.embed, client.generate):
            with pytest.raises(InvalidArgument, match=header.lower()):
                await call("text", extra_headers={header: "3"})
        with pytest.raises(InvalidArgument):
            client.with_options(extra_headers={header: "3"})
    fleet.assert_nothing_sent()


@pytest.mark.parametrize(
    ("header", "option"),
    [
        ("X-Request-ID", "request_id"),
        ("X-Request-Timeout-Ms", "timeout"),
        ("x-priority", "priority"),
        ("X-NPU-Require-Device", "require_device"),
        ("X-NPU-Local-Only", "local_only"),
    ],
)
async def test_a_header_for_which_there_is_an_option_names_it(fleet, header, option):
    async with fleet.async_client() as client:
        with pytest.raises(InvalidArgument, match=f"give the option {option}"):
            await client.embed("text", extra_headers={header: "1"})
    fleet.assert_nothing_sent()


@pytest.mark.parametrize("url", ["", "api.example.org/v1", "ftp://example.org", "https://"])
def test_the_clouds_address_is_one(url):
    # An empty one would mean OpenAI: a variable without a value must not decide where prompts go.
    with pytest.raises(ValueError, match="https://host/v1"):
        CloudSettings(api_key="k", base_url=url)


def test_no_password_of_a_proxy_and_no_key_in_a_query_is_shown(monkeypatch):
    monkeypatch.setenv("NPU_CLIENT_PROXY", "http://user:hunter2@proxy:3128")
    settings = ClientSettings.load(nodes=[NODE])
    assert settings.proxy.get_secret_value().startswith("http://user:hunter2@")
    client = NPUClient.from_settings(settings)
    for shown in (repr(settings), str(settings.model_dump()), repr(client), repr(client.backend)):
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
    ("/v1/chat/completions", "max_tokens", [0, -1, -1_000_000, 1.0, 2.5, "5", True, float("inf"), float("nan")]),
    ("/v1/chat/completions", "max_completion_tokens", [0, -5]),
    ("/v1/chat/completions", "n", [0, -1, 2.0, "2", True, [2]]),
    ("/v1/chat/completions", "temperature", [float("nan"), float("inf")]),
    ("/v1/completions", "max_tokens", [-1, "0"]),
    ("/v1/responses", "max_output_tokens", [0, -1]),
    ("/v1/embeddings", "dimensions", [0, -1, "8", 8.0]),
    ("/v1/rerank", "top_n", [0, -1, "1"]),
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
