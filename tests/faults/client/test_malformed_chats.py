"""Malformed or unfinished chats, over real sockets: another node answers, or the caller gets a typed error."""

import openai as sdk
import pytest
from aiohttp import web

import backend_client
from backend_client import ClientOptions, ClientSettings, CloudClient, CloudSettings, NPUClient, StreamInterrupted
from backend_client.errors import CloudError, NPUUnavailableError
from tests.faults.scripted_node import ANSWER, TOOL, WRITER, ScriptedNode, answering, done_event, sse, streamed

QUESTION = [{"role": "user", "content": "Where?"}]
TEXT = "".join(ANSWER)


def in_turn(servers, *replies):
    replies = list(replies)
    for server in servers:
        server.respond = answering(lambda: replies.pop(0) if replies else None)


@pytest.fixture
async def direct(cloud):
    async with CloudClient(CloudSettings(api_key="k", base_url=cloud.url, chat_model="chat")) as client:
        yield client


def part(text="", reason=None, index=0, **delta):
    return {"index": index, "delta": {"content": text, **delta}, "finish_reason": reason}


def stream_of(*choices):
    return streamed(*({"choices": [choice]} for choice in choices))


def whole_of(*choices):
    whole = [{**each, "message": {"role": "assistant", **each["delta"]}} for each in choices]
    return web.json_response({"model": "chat", "choices": whole})


MALFORMED = [
    {"choices": 5},
    {"choices": [5]},
    {"choices": [{"index": [], "delta": {}}]},
    {"choices": [{"delta": "text"}]},
    {"choices": [{"delta": {"content": 5}}]},
    {"choices": [{"delta": {"tool_calls": [{"function": "f"}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": "0", "function": {"arguments": {}}}]}}]},
    {"choices": [{"delta": {}, "finish_reason": 5}]},
]


async def test_a_malformed_chat_is_answered_by_another_node_or_interrupted(client, pair, cloud, direct):
    for event in MALFORMED:
        in_turn(pair, streamed(event))
        reply = await client.chat(QUESTION)
        assert (reply.text, [attempt.outcome for attempt in reply.attempts]) == (TEXT, ["BadReply", "ok"]), event
    in_turn([*pair, cloud], *(streamed({"choices": [part("so far")]}, event) for _ in range(2)))
    for asked in (client, direct):
        stream = asked.stream_chat(QUESTION)
        assert (await anext(stream)).text == "so far"
        with pytest.raises(StreamInterrupted) as caught:
            await anext(stream)
        assert caught.value.partial_text == "so far"


TWO = [part("a", "stop", 0), part("b", "stop", 1)]
# How many choices are asked for, and what comes instead.
OTHERWISE = {
    "one of two": (2, [part("a", "stop")]),
    "two for one": (1, TWO),
    "another index": (1, [part("a", "stop", 1)]),
    "an index below": (1, [part("a", "stop", -1)]),
    "an index twice": (2, [part("a", "stop"), part("b", "stop")]),
    "one that does not end": (2, [part("a", "stop"), part("b", None, 1)]),
    "no reason": (1, [part("a")]),
    "an empty reason": (1, [part("a"), part("", "")]),
    "an unknown reason": (1, [part("a", "abort")]),
    "an error": (1, [part("a", "error")]),
    "no tool": (1, [part("a", "tool_calls")]),
    "text after its end": (1, [part("a", "stop"), part("more")]),
    "another end after its end": (1, [part("a", "stop"), part("", "length")]),
    "a call after its end": (1, [part("a", "stop"), part(tool_calls=[{"index": 0}])]),
}


@pytest.mark.parametrize("name", OTHERWISE)
async def test_an_answer_with_other_choices_or_without_its_end_is_malformed(client, pair, cloud, direct, name):
    count, choices = OTHERWISE[name]
    in_turn(pair, stream_of(*choices), stream_of(*TWO[:count]))
    reply = await client.chat(QUESTION, n=count)
    assert [choice.text for choice in reply.choices] == ["a", "b"][:count]
    assert [attempt.outcome for attempt in reply.attempts] == ["BadReply", "ok"]
    in_turn([cloud], whole_of(*choices), whole_of(*TWO[:count]))
    with pytest.raises(CloudError, match=r"choices|finish_reason|not a chat completion"):
        await direct.chat(QUESTION, n=count)
    assert len((await direct.chat(QUESTION, n=count)).choices) == count
    # One for the cloud, and as many as a call may try.
    in_turn([*pair, cloud], *(stream_of(*choices) for _ in range(4)))
    for asked in (direct, client):
        stream = asked.stream_chat(QUESTION, n=count)
        with pytest.raises((CloudError, StreamInterrupted, NPUUnavailableError), match=r"choice|finish_reason"):
            [_ async for _ in stream]
        assert stream.result is None


async def test_a_stream_may_be_no_longer_than_any_other_reply(scripted):
    async with NPUClient([scripted.url], options=ClientOptions(max_reply_bytes=10_000)) as client:
        assert (await client.chat(QUESTION)).text == TEXT
        scripted.respond = answering(lambda: stream_of(*[part("x" * 1000)] * 20, part("", "stop")))
        with pytest.raises(NPUUnavailableError, match="it is too long"):
            await client.chat(QUESTION, timeout=2)
    async with NPUClient([scripted.url]) as client:
        assert len((await client.chat(QUESTION)).text) == 20_000


async def test_a_generation_that_ends_without_a_reason_is_interrupted(client, pair):
    def unfinished():
        return streamed(sse("token", {"text": "so far"}), sse("done", {**done_event(), "finish_reason": None}))

    in_turn(pair, unfinished())
    result = await client.generate("prompt")
    assert (result.text, len(result.attempts)) == (TEXT, 2)
    in_turn(pair, unfinished())
    with pytest.raises(StreamInterrupted, match="finish_reason") as caught:
        [_ async for _ in client.stream("prompt")]
    assert caught.value.partial_text == "so far"


async def test_a_chat_whose_choices_have_ended_needs_no_done(client, pair):
    events = {"choices": [part("Paris")]}, {"choices": [part("", "stop")]}
    in_turn(pair, *(streamed(*events, done=False) for _ in range(2)))
    stream = client.stream_chat(QUESTION)
    assert "".join([delta.text async for delta in stream]) == "Paris"
    for result in (stream.result, await client.chat(QUESTION)):
        assert (result.text, result.finish_reason, len(result.attempts)) == ("Paris", "stop", 1)


async def test_a_response_that_ends_before_it_is_complete_is_interrupted():
    events = {"type": "response.created"}, {"type": "response.output_text.delta", "delta": "so far"}
    respond = answering(lambda: streamed(*events))
    async with (
        ScriptedNode(routes=[web.post("/v1/responses", respond)]).running() as node,
        backend_client.openai(ClientSettings(nodes=[node.url])) as openai,
    ):
        stream = await openai.responses.create(model=WRITER, input="Where?", stream=True)
        seen = []
        with pytest.raises(sdk.APIError, match="before the response was complete"):
            async for event in stream:
                seen += [event.type]
    assert seen == ["response.created", "response.output_text.delta"]


def call_part(arguments, name):
    function = {"name": name, "arguments": arguments}
    return part(tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": function}])


@pytest.mark.parametrize("names", [("weather", "weather", "weather"), ("weather", None, ""), ("wea", "ther", None)])
async def test_the_name_of_a_tool_is_read_once(client, pair, cloud, direct, names):
    parts = [call_part(text, name) for text, name in zip(("{", '"a": 1', "}"), names, strict=True)]
    in_turn([*pair, cloud], *(stream_of(*parts, part("", "tool_calls")) for _ in range(3)))
    for asked in (client, direct):
        stream = asked.stream_chat(QUESTION, tools=[TOOL])
        deltas = [call async for delta in stream for call in delta.tool_calls]
        assert "".join(delta.name or "" for delta in deltas) == "weather"
        [call] = stream.result.tool_calls
        assert (call.name, call.parsed_arguments()) == ("weather", {"a": 1})
    async with backend_client.openai(ClientSettings(nodes=[node.url for node in pair])) as openai:
        stream = await openai.chat.completions.create(model=WRITER, messages=QUESTION, tools=[TOOL], stream=True)
        choices = [choice async for chunk in stream for choice in chunk.choices]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert "".join(call.function.name or "" for call in calls) == "weather"


async def test_halves_of_a_character_in_two_events_are_text_that_can_be_encoded(client, pair, cloud, direct):
    halves = ["A\ud83d", "\ude00B"]  # as JSON escapes them
    in_turn(pair, streamed(*(sse("token", {"text": half}) for half in halves), sse("done", done_event())))
    texts = [(await client.generate("prompt")).text]
    in_turn([*pair, cloud], *(stream_of(*map(part, halves), part("", "stop")) for _ in range(2)))
    for asked in (client, direct):
        stream = asked.stream_chat(QUESTION)
        texts += ["".join([delta.text async for delta in stream]), stream.result.text]
    assert {text.encode() for text in texts} == {"A\ufffd\ufffdB".encode()}
