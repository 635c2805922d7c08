"""A stream is an answer only with its end: one that stops, or ends without a reason, is interrupted with its text."""

import json

import openai as sdk
import pytest
from aiohttp import web

import backend_client
from backend_client import ClientSettings, CloudClient, CloudSettings, NPUClient, StreamInterrupted
from tests.faults.chat_node import TOOL
from tests.faults.client.test_malformed_chats import QUESTION, TEXT, once
from tests.faults.scripted_node import ANSWER, WRITER, ScriptedNode, choice, data_event, done_event, sse

PART = {"choices": [choice({"content": "so far"})]}
END = {"choices": [choice({}, "stop")]}
DONE = b"data: [DONE]\n\n"
UNFINISHED = {
    "no reason": [PART],
    "an empty reason": [PART, {"choices": [choice({}, "")]}],
}


def reply_of(*events, head=b""):
    body = head + b"".join(map(data_event, events)) + DONE
    return web.Response(body=body, content_type="text/event-stream")


def always(reply):
    async def respond(_):
        return reply()

    return respond


def cloud_client(cloud):
    return CloudClient(CloudSettings(api_key="k", base_url=cloud.url, chat_model="chat"))


@pytest.mark.parametrize("events", UNFINISHED.values(), ids=UNFINISHED)
async def test_a_chat_that_ends_without_a_reason_is_interrupted(chat_client, chats, cloud, events):
    once(chats, reply_of(*events))
    reply = await chat_client.chat(QUESTION)
    assert (reply.text, [attempt.outcome for attempt in reply.attempts]) == (TEXT, ["BadReply", "ok"])
    cloud.respond = always(lambda: reply_of(*events))
    async with cloud_client(cloud) as direct:
        for client in (chat_client, direct):
            once(chats, reply_of(*events))
            stream = client.stream_chat(QUESTION)
            with pytest.raises(StreamInterrupted, match="finish_reason") as caught:
                [_ async for _ in stream]
            assert caught.value.partial_text == "so far"
            assert stream.result is None
        tokens = direct.stream("Where?")
        with pytest.raises(StreamInterrupted, match="finish_reason") as caught:
            [_ async for _ in tokens]
        assert (caught.value.partial_text, tokens.result) == ("so far", None)


@pytest.mark.parametrize("reason", [None, "", 5, "abort"])
async def test_a_generation_that_ends_without_a_reason_is_interrupted(pair, reason):
    asked = []

    async def respond(_):
        asked.append(1)
        if len(asked) % 2:
            body = sse("token", {"text": "so far"}) + sse("done", {**done_event(), "finish_reason": reason})
            return web.Response(body=body, content_type="text/event-stream")
        return None

    for node in pair:
        node.respond = respond
    async with NPUClient([node.url for node in pair]) as client:
        result = await client.generate("prompt")
        assert (result.text, len(result.attempts)) == ("".join(ANSWER), 2)
        with pytest.raises(StreamInterrupted, match="finish_reason") as caught:
            [_ async for _ in client.stream("prompt")]
        assert caught.value.partial_text == "so far"


async def test_a_response_that_ends_before_it_is_complete_is_interrupted():
    async def respond(_):
        return reply_of({"type": "response.created"}, {"type": "response.output_text.delta", "delta": "so far"})

    node = ScriptedNode()
    node.more_routes = [web.post("/v1/responses", respond)]
    async with node.running(), backend_client.openai(ClientSettings(nodes=[node.url])) as openai:
        stream = await openai.responses.create(model=WRITER, input="Where?", stream=True)
        seen = []
        with pytest.raises(sdk.APIError, match="before the response was complete"):
            async for event in stream:
                seen += [event.type]
    assert seen == ["response.created", "response.output_text.delta"]


def call_part(arguments, name="weather"):
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"choices": [choice({"tool_calls": [call]})]}


@pytest.mark.parametrize("names", [("weather", "weather", "weather"), ("weather", None, ""), ("wea", "ther", None)])
async def test_the_name_of_a_tool_is_read_once(chat_client, chats, cloud, names):
    parts = [call_part(part, name) for part, name in zip(("{", '"a": 1', "}"), names, strict=True)]
    events = [*parts, {"choices": [choice({}, "tool_calls")]}]
    cloud.respond = always(lambda: reply_of(*events))
    async with cloud_client(cloud) as direct:
        for client in (chat_client, direct):
            once(chats, reply_of(*events))
            stream = client.stream_chat(QUESTION, tools=[TOOL])
            deltas = [delta.tool_calls[0] async for delta in stream]
            assert "".join(delta.name or "" for delta in deltas) == "weather"
            [call] = stream.result.tool_calls
            assert (call.name, call.parsed_arguments()) == ("weather", {"a": 1})
    async with backend_client.openai(ClientSettings(nodes=[node.url for node, _ in chats])) as openai:
        once(chats, reply_of(*events))
        stream = await openai.chat.completions.create(model=WRITER, messages=QUESTION, tools=[TOOL], stream=True)
        names = [chunk.choices[0].delta.tool_calls[0].function.name or "" async for chunk in stream if _calls(chunk)]
    assert "".join(names) == "weather"


def _calls(chunk):
    return chunk.choices and chunk.choices[0].delta.tool_calls


HALVES = ["A\ud83d", "\ude00B"]


async def test_halves_of_a_character_in_two_events_are_text_that_can_be_encoded(chat_client, chats, cloud, scripted):
    # json.dumps escapes a half as it is.
    assert json.dumps(HALVES) == '["A\\ud83d", "\\ude00B"]'
    events = [*({"choices": [choice({"content": half})]} for half in HALVES), END]
    cloud.respond = always(lambda: reply_of(*events))

    async def respond(_):
        body = b"".join(sse("token", {"text": half}) for half in HALVES) + sse("done", done_event())
        return web.Response(body=body, content_type="text/event-stream")

    scripted.respond = respond
    async with cloud_client(cloud) as direct, NPUClient([scripted.url]) as native:
        texts = [(await native.generate("prompt")).text]
        for client in (chat_client, direct):
            once(chats, reply_of(*events))
            stream = client.stream_chat(QUESTION)
            texts += ["".join([delta.text async for delta in stream]), stream.result.text]
    assert {text.encode() for text in texts} == {"A\ufffd\ufffdB".encode()}
