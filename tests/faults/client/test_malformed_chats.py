"""Malformed chats and token counts, over real sockets: another node answers, or the caller gets a typed error."""

import pytest
from aiohttp import web

from backend_client import ClientOptions, CloudClient, CloudSettings, NPUClient, NPUUnavailableError, StreamInterrupted
from backend_client.errors import CloudError
from tests.faults.chat_node import ChatNode
from tests.faults.scripted_node import ANSWER, ScriptedNode, data_event

QUESTION = [{"role": "user", "content": "Where?"}]
TEXT = "".join(ANSWER)


def once(chats, reply):
    """The first request to any node gets this reply, all others the usual ones."""
    replies = [reply]

    async def respond(_):
        return replies.pop() if replies else None

    for _, chat in chats:
        chat.respond = respond


MALFORMED = [
    {"choices": 5},
    {"choices": [5]},
    {"choices": [{"index": [], "delta": {}}]},
    {"choices": [{"delta": "text"}]},
    {"choices": [{"delta": {"content": 5}}]},
    {"choices": [{"delta": {"tool_calls": 5}}]},
    {"choices": [{"delta": {"tool_calls": [5]}}]},
    {"choices": [{"delta": {"tool_calls": [{"function": "f"}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": "0", "function": {"arguments": {}}}]}}]},
    {"choices": [{"delta": {}, "finish_reason": 5}]},
]


def stream_of(*events):
    body = b"".join(data_event(event) for event in events) + b"data: [DONE]\n\n"
    return web.Response(body=body, content_type="text/event-stream")


@pytest.mark.parametrize("event", MALFORMED)
async def test_a_malformed_chat_is_answered_by_the_other_node(chat_client, chats, event):
    once(chats, stream_of(event))
    reply = await chat_client.chat(QUESTION)
    assert (reply.text, [attempt.outcome for attempt in reply.attempts]) == (TEXT, ["BadReply", "ok"])
    once(chats, stream_of(event))
    stream = chat_client.stream_chat(QUESTION)
    assert "".join([delta.text async for delta in stream]) == TEXT
    assert [attempt.outcome for attempt in stream.result.attempts] == ["BadReply", "ok"]


@pytest.mark.parametrize("event", MALFORMED)
async def test_a_stream_that_turns_malformed_is_interrupted_with_its_text(chat_client, chats, event):
    once(chats, stream_of({"choices": [{"index": 0, "delta": {"content": "so far"}}]}, event))
    stream = chat_client.stream_chat(QUESTION)
    assert (await anext(stream)).text == "so far"
    with pytest.raises(StreamInterrupted) as caught:
        await anext(stream)
    assert caught.value.partial_text == "so far"


@pytest.mark.parametrize("event", MALFORMED[1:])
async def test_a_malformed_chat_of_the_cloud_is_a_typed_error(cloud, event):
    async def respond(_):
        return stream_of({"choices": [{"index": 0, "delta": {"content": "so far"}}]}, event)

    async def whole(_):
        return web.json_response({"choices": [{"message": {"content": "", "tool_calls": [{"function": 5}]}}]})

    async with CloudClient(CloudSettings(api_key="k", base_url=cloud.url, chat_model="chat")) as client:
        cloud.respond = respond
        stream = client.stream_chat(QUESTION)
        assert (await anext(stream)).text == "so far"
        with pytest.raises(StreamInterrupted):
            await anext(stream)
        cloud.respond = whole
        with pytest.raises(CloudError, match="not a chat completion"):
            await client.chat(QUESTION)


def in_turn(chats, *replies):
    """The requests to any node, or to the cloud, get these replies."""
    replies = list(replies)

    async def respond(_):
        return replies.pop(0)

    for server in chats:
        server.respond = respond


def part(text="", reason=None, index=0, **delta):
    return {"index": index, "delta": {"content": text, **delta}, "finish_reason": reason}


def whole_of(parts):
    """What a stream of these parts says, not streamed."""
    choices = [
        {
            "index": each["index"],
            "message": {"role": "assistant", **each["delta"]},
            "finish_reason": each["finish_reason"],
        }
        for each in parts
    ]
    return web.json_response({"model": "chat", "choices": choices})


TWO = [part("a", "stop", 0), part("b", "stop", 1)]
# How many choices are asked for, and what comes instead.
OTHERWISE = {
    "one of two": (2, [part("a", "stop")]),
    "two for one": (1, TWO),
    "another index": (1, [part("a", "stop", 1)]),
    "an index below": (1, [part("a", "stop", -1)]),
    "an index twice": (2, [part("a", "stop"), part("b", "stop")]),
    "one that does not end": (2, [part("a", "stop"), part("b", None, 1)]),
    "a reason that there is not": (1, [part("a", "abort")]),
    "an error": (1, [part("a", "error")]),
    "no tool": (1, [part("a", "tool_calls")]),
}


@pytest.mark.parametrize("name", OTHERWISE)
async def test_an_answer_with_other_choices_than_were_asked_for_is_none(chat_client, chats, cloud, name):
    count, parts = OTHERWISE[name]
    good = TWO[:count]
    bad = [stream_of(*({"choices": [each]} for each in parts)), whole_of(parts)]
    in_turn([chat for _, chat in chats], bad[0], stream_of({"choices": good}))
    reply = await chat_client.chat(QUESTION, n=count)
    assert [choice.text for choice in reply.choices] == ["a", "b"][:count]
    assert [attempt.outcome for attempt in reply.attempts] == ["BadReply", "ok"]
    async with CloudClient(CloudSettings(api_key="k", base_url=cloud.url, chat_model="chat")) as client:
        in_turn([cloud], bad[1], whole_of(good))
        with pytest.raises(CloudError, match=r"choices|finish_reason"):
            await client.chat(QUESTION, n=count)
        assert len((await client.chat(QUESTION, n=count)).choices) == count
        in_turn([cloud], stream_of(*({"choices": [each]} for each in parts)))
        with pytest.raises((CloudError, StreamInterrupted), match=r"choice|finish_reason"):
            [_ async for _ in client.stream_chat(QUESTION, n=count)]


async def test_a_stream_may_be_no_longer_than_any_other_reply():
    async def respond(_):
        return stream_of(*[{"choices": [part("x" * 1000)]}] * 20, {"choices": [part("", "stop")]})

    node, chat = ScriptedNode(), ChatNode()
    node.more_routes = chat.routes()
    async with node.running():
        async with NPUClient([node.url], options=ClientOptions(max_reply_bytes=10_000)) as client:
            assert (await client.chat(QUESTION)).text == TEXT
            chat.respond = respond
            with pytest.raises(NPUUnavailableError, match="it is too long"):
                await client.chat(QUESTION, timeout=2)
        async with NPUClient([node.url]) as client:
            assert len((await client.chat(QUESTION)).text) == 20_000


@pytest.mark.parametrize("after", [part("more"), part("", "length"), part(tool_calls=[{"index": 0}])])
async def test_nothing_comes_after_the_end_of_a_choice(chat_client, chats, after):
    once(chats, stream_of({"choices": [part("a", "stop")]}, {"choices": [after]}))
    reply = await chat_client.chat(QUESTION)
    assert (reply.text, [attempt.outcome for attempt in reply.attempts]) == (TEXT, ["BadReply", "ok"])
