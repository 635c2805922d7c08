"""Anthropic's Messages API: its stock Python client against a real node, and what a coding agent sends."""

import json

import pytest

from tests.support.gateway import WAYS, reached
from tests.support.later import Later
from tests.support.nodes import start_node

anthropic = Later("anthropic")

pytestmark = pytest.mark.real

MODEL = "smollm2"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}

RIGHT = "right-0123456789abcdef"


def client_of(node, key="unused"):
    return anthropic.Anthropic(base_url=node.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module", params=WAYS)
def client(request, whole_node):
    with reached(whole_node, request.param) as node, client_of(node) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(quick_models):
    with start_node(NPU_NODE_API_KEYS=RIGHT, NPU_NODE_MAX_BODY_BYTES="20000", **quick_models) as node:
        yield node


def ask(client, **fields):
    return client.messages.create(**{"model": MODEL, "max_tokens": 32, "messages": CAPITAL} | fields)


def test_a_stream_holds_the_whole_answer_in_the_documented_events(client):
    whole = ask(client, system="Be short.")
    assert "Paris" in whole.content[0].text
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    raw = client.messages.with_raw_response.create(
        model=MODEL, max_tokens=32, messages=CAPITAL, system="Be short.", stream=True
    )
    names = [line.removeprefix("event: ") for line in raw.http_response.iter_lines() if line.startswith("event: ")]
    begun, ended = (
        ["message_start", "ping", "content_block_start"],
        ["content_block_stop", "message_delta", "message_stop"],
    )
    assert names[:3] + names[-3:] == begun + ended
    assert set(names[3:-3]) == {"content_block_delta"}
    with client.messages.stream(model=MODEL, max_tokens=32, messages=CAPITAL, system="Be short.") as stream:
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    counted = client.messages.count_tokens(model=MODEL, messages=CAPITAL, system="Be short.").input_tokens
    assert [read.input_tokens + read.cache_read_input_tokens for read in (whole.usage, final.usage)] == [counted] * 2
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_tokens_that_the_cache_held_are_counted_apart(client):
    long = "Answer with one word only, whatever the question is, and never explain your answer. " * 4
    first, again = (
        client.messages.create(model=MODEL, max_tokens=4, messages=CAPITAL, system=long).usage for _ in range(2)
    )
    assert again.cache_read_input_tokens >= 32
    assert again.input_tokens + again.cache_read_input_tokens == first.input_tokens + first.cache_read_input_tokens


def test_a_billing_line_in_the_instructions_is_not_part_of_the_prompt(client):
    plain = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    billed = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"}, *plain]
    counts = [
        client.messages.count_tokens(model=MODEL, messages=CAPITAL, system=system).input_tokens
        for system in ("Be short.", plain, billed, "x-anthropic-billing-header: 1\nBe short.")
    ]
    assert len(set(counts)) == 1


def test_an_answer_stops_at_a_sequence_and_continues_a_last_turn_of_the_assistant(client):
    reply = ask(
        client, messages=[*CAPITAL, {"role": "assistant", "content": "The capital of"}], stop_sequences=["Paris"]
    )
    assert reply.content[0].text.strip() == "France is"
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Paris")
    assert ask(client, max_tokens=1).stop_reason == "max_tokens"


def test_tools_are_called_and_their_results_read(client):
    forced = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 64}
    reply = ask(client, **forced)
    (call,) = reply.content
    assert (reply.stop_reason, call.type, call.name, set(call.input)) == ("tool_use", "tool_use", "weather", {"city"})
    with client.messages.stream(model=MODEL, messages=CAPITAL, **forced) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*CAPITAL, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    without, with_it = (
        client.messages.count_tokens(model=MODEL, messages=messages, tools=[WEATHER]).input_tokens
        for messages in (turns[:1], turns)
    )
    assert with_it > without
    assert ask(client, messages=turns, tools=[WEATHER]).content
    assert "weather" not in [block.type for block in ask(client, tools=[WEATHER], tool_choice={"type": "none"}).content]


def test_an_answer_is_held_to_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    reply = ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(reply.content[0].text)["city"] in {"Paris", "Rome"}


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"model": "claude-none"}, "not_found_error", "claude-none"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "invalid_request_error", "prompt is too long: "),
        ({"messages": [{"role": "user", "content": "word " * 90000}]}, "invalid_request_error", "prompt is too long: "),
        ({"messages": [{"role": "user", "content": [PNG]}]}, "invalid_request_error", "does not read images"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]}, "invalid_request_error", "'other'"),
        ({"messages": []}, "invalid_request_error", "messages"),
        ({"extra_body": {"max_tokens": None}}, "invalid_request_error", "max_tokens"),
        ({"extra_body": {"mcp_servers": [{"url": "http://x"}]}}, "invalid_request_error", "mcp_servers"),
        ({"extra_headers": {"X-NPU-Require-Device": "NPU"}}, "overloaded_error", "NPU"),
    ],
)
def test_refusals_are_in_anthropics_form(client, fields, kind, message):
    with pytest.raises(anthropic.APIStatusError) as refused:
        ask(client, **fields)
    body = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert message in body["error"]["message"]
    if message.startswith("prompt is too long"):
        tokens, _, most = (
            body["error"]["message"].removeprefix(message).removesuffix(" maximum").partition(" tokens > ")
        )
        assert int(tokens) > int(most)
    assert (refused.value.status_code == 529) == (kind == "overloaded_error")


def test_refusals_before_a_handler_are_in_anthropics_form(guarded):
    for key, fields, kind in (
        ("wrong", {}, "authentication_error"),
        (RIGHT, {"system": "x" * 30_000}, "request_too_large"),
        (RIGHT, {"extra_headers": {"Host": "a b"}}, "invalid_request_error"),
    ):
        with client_of(guarded, key) as client, pytest.raises(anthropic.APIStatusError) as refused:
            ask(client, **fields)
        assert refused.value.body["error"]["type"] == kind
    with client_of(guarded, RIGHT) as client:
        assert ask(client, max_tokens=2).usage.output_tokens == 2
        assert client.get("/v1/models", cast_to=object)["data"]
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.batches.list()
    assert missing.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": RIGHT}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": RIGHT, "Authorization": "Bearer wrong"}, 401),
        ({}, 401),
    ],
)
async def test_a_key_may_come_as_x_api_key(http, guarded, headers, status):
    body = {"model": MODEL, "messages": CAPITAL, "max_tokens": 1}
    async with http.post(guarded.url + "/v1/messages?beta=true", json=body, headers=headers) as reply:
        assert reply.status == status


def test_models_are_listed_in_anthropics_form(client):
    (listed,) = client.models.list(limit=1000)
    assert client.models.retrieve(listed.id) == listed
    assert listed.id == "smollm2-135m-instruct"
    # Its client asks for page after page while there are more.
    assert [model.id for model in client.models.list(limit=1)] == [listed.id]
    assert not client.models.list(after_id=listed.id).data
    for wrong in ({"limit": 0}, {"limit": 1001}, {"limit": -1}, {"after_id": "none"}, {"before_id": "none"}):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.models.list(**wrong)
        assert refused.value.body["error"]["type"] == "invalid_request_error"
