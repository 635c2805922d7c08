"""Malformed chats and token counts, over real sockets: another node answers, or the caller gets a typed error."""

import pytest
from aiohttp import web

from backend_client import CloudClient, CloudError, CloudSettings, StreamInterrupted
from tests.faults.chat_node import TOOL
from tests.faults.scripted_node import ANSWER, data_event

QUESTION = [{"role": "user", "content": "Where?"}]
TEXT = "".join(ANSWER)


def once(chats, reply):
    """The first request to any node gets this reply, all others the usual ones."""
    replies = [reply]

    async def respond(_):
        return replies.pop() if replies else None

    for _, chat in chats:
        chat.respond = respond


@pytest.mark.parametrize("body", [{}, {"count": "8"}, {"count": True}, {"count": -1}, [], None, "8"])
async def test_a_malformed_token_count_is_followed_by_another_nodes(chat_client, chats, body):
    once(chats, web.json_response(body))
    assert await chat_client.count_tokens("Where?") == 8
    assert sum(len(chat.bodies) for _, chat in chats) == 2


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
        with pytest.raises(CloudError, match="no chat completion"):
            await client.chat(QUESTION)


async def test_a_chat_without_a_function_name_is_answered_by_the_other_node(chat_client, chats):
    call = {"index": 0, "id": "call_1", "function": {"arguments": "{}"}}
    events = [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}]
    once(chats, stream_of(*events))
    reply = await chat_client.chat(QUESTION, tools=[TOOL])
    assert reply.tool_calls[0].name == "weather"
    assert len(reply.attempts) == 2
