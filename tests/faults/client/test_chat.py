"""Chats over real sockets: tools, schemas, streams, failures in the middle, the cloud behind the nodes."""

import pickle
from functools import partial

import pytest
from pydantic import BaseModel

from backend_client import InvalidArgument
from backend_client.errors import InvalidAnswer
from tests.faults.scripted_node import ANSWER, TOOL, WRITER, answering, choice, streamed

QUESTION = [{"role": "user", "content": "Where?"}]
TEXT = "".join(ANSWER)


class Person(BaseModel):
    name: str
    age: int = 0


def bodies(pair):
    return [body for chat in pair for body in chat.bodies]


async def test_a_chat_has_its_text_its_usage_and_who_answered(client, pair):
    reply = await client.chat(
        QUESTION, temperature=0, max_tokens=9, top_k=4, request_id="mine", extra_headers={"X-A": "b"}
    )
    assert (reply.text, reply.finish_reason, reply.tool_calls, reply.model) == (TEXT, "stop", (), WRITER)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, len(ANSWER))
    assert (reply.device, reply.request_id) == ("CPU", "mine")
    assert reply.message == {"role": "assistant", "content": TEXT}
    assert reply.headers["x-npu-node-device"] == "CPU"
    assert [attempt.outcome for attempt in reply.attempts] == ["ok"]
    [body] = bodies(pair)
    sent = {"messages": QUESTION, "temperature": 0, "max_tokens": 9, "top_k": 4, "model": WRITER}
    assert {name: body[name] for name in sent} == sent
    [request] = [request for node in pair for request in node.requests]
    assert (request.headers["X-Request-ID"], request.headers["X-A"]) == ("mine", "b")
    assert pickle.loads(pickle.dumps(reply)) == reply  # noqa: S301


async def test_tool_calls_are_typed(client):
    reply = await client.chat(QUESTION, tools=[TOOL], tool_choice="auto")
    [call] = reply.tool_calls
    assert (call.id, call.name, call.parsed_arguments()) == ("call_fake", "weather", {"city": "Bonn"})
    assert (reply.finish_reason, reply.text) == ("tool_calls", "")
    assert reply.message["tool_calls"][0]["function"]["arguments"] == '{"city": "Bonn"}'


@pytest.fixture
def filling(pair):
    for node in pair:
        node.answer = '{"name": "Ada", "age": 36}'


@pytest.mark.usefixtures("filling")
async def test_an_answer_is_an_object_of_the_model(client, pair):
    assert await client.parse(QUESTION, Person) == Person(name="Ada", age=36)
    reply = await client.chat(QUESTION, response_format=Person)
    assert reply.parsed == Person(name="Ada", age=36)
    schema = bodies(pair)[0]["response_format"]["json_schema"]
    assert schema["schema"]["required"] == ["name", "age"]
    assert schema["schema"]["additionalProperties"] is False


@pytest.mark.usefixtures("filling")
async def test_an_answer_that_is_no_such_object_is_an_error_with_the_text(client):
    class Planet(BaseModel):
        moons: int

    with pytest.raises(InvalidAnswer, match="moons") as caught:
        await client.parse(QUESTION, Planet)
    assert caught.value.text == '{"name": "Ada", "age": 36}'
    assert "Ada" not in str(caught.value)
    with pytest.raises(InvalidAnswer, match="called a tool instead"):
        await client.parse(QUESTION, Planet, tools=[TOOL])
    with pytest.raises(InvalidArgument, match="pydantic"):
        await client.parse(QUESTION, dict)


@pytest.mark.parametrize(("reason", "hint"), [("length", "increase max_tokens"), ("content_filter", "it was filtered")])
@pytest.mark.parametrize("place", [0, 1])
async def test_an_answer_that_was_cut_or_filtered_is_no_object_even_if_it_matches(client, pair, reason, hint, place):
    async def respond(request):
        count = (await request.json()).get("n", 1)
        whole = [choice({"content": '{"name": "Ada", "age": 36}'}, "stop") | {"index": index} for index in range(count)]
        whole[place]["finish_reason"] = reason
        return streamed({"choices": whole})

    for chat in pair:
        chat.respond = respond
    stream = client.stream_chat(QUESTION, response_format=Person, n=place + 1)
    for call in (
        client.parse(QUESTION, Person, n=place + 1),
        client.chat(QUESTION, response_format=Person, n=place + 1),
        anext(delta async for delta in stream if stream.result),
    ):
        with pytest.raises(InvalidAnswer, match=hint) as caught:
            await call
        assert caught.value.finish_reason == reason
    # Without a model it is for the caller to decide.
    assert (await client.chat(QUESTION, n=place + 1)).choices[place].finish_reason == reason


async def test_reasoning_is_apart_from_the_text_streamed_or_not(client, pair):
    parts = [
        choice({"reasoning_content": "Let me "}),
        choice({"reasoning_content": "think."}),
        choice({"content": "Bonn"}),
    ]
    for node in pair:
        node.respond = answering(lambda: streamed(*({"choices": [each]} for each in [*parts, choice({}, "stop")])))
    stream = client.stream_chat(QUESTION)
    deltas = [(delta.reasoning, delta.text) async for delta in stream]
    assert deltas == [("Let me ", ""), ("think.", ""), ("", "Bonn")]
    for result in (stream.result, await client.chat(QUESTION)):
        assert (result.choices[0].reasoning, result.text) == ("Let me think.", "Bonn")


async def test_what_an_answer_took_is_read_at_the_end_of_its_stream(client, pair):
    taken = {"npu_busy_delta_us": 5, "joules": 0.25}
    usage = {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 1}, **taken}
    for node in pair:
        node.respond = answering(partial(streamed, {"choices": [choice({"content": "Bonn"}, "stop")]}, usage))
    stream = client.stream_chat(QUESTION)
    assert [delta.text async for delta in stream] == ["Bonn"]
    assert (stream.result.npu_busy_delta_us, stream.result.joules) == (5, 0.25)


async def test_tokens_are_counted_by_the_node(client, pair):
    assert await client.count_tokens(QUESTION) == 4
    assert await client.count_tokens("Where is it?") == 3
    assert sorted([*body] for body in bodies(pair)) == [["messages", "model"], ["prompt", "model"]]


async def test_a_view_has_other_defaults_and_the_same_connections(client, pair):
    view = client.with_options(request_id="view", timeout=5)
    assert (await view.chat(QUESTION)).request_id == "view"
    assert (await view.with_options(request_id="inner").chat(QUESTION)).request_id == "inner"
    assert (await client.chat(QUESTION)).request_id != "view"
    assert view.fleet is client.fleet
    with pytest.raises(InvalidArgument, match="temperature"):
        client.with_options(temperature=1)
