"""Anthropic's dialect around an engine that writes a given text: what is refused, combined and passed over."""

import pytest

from tests.support.later import Later
from tests.support.writing import WRITER, writing

anthropic = Later("anthropic")

VERSION = {"anthropic-version": "2023-06-01"}
HELLO = {"role": "user", "content": "Hello!"}
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}


def called(*ids):
    return {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": call, "name": "weather", "input": {}} for call in ids],
    }


def results(*ids):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": "9"} for call in ids]}


async def send(client, *messages, path="/v1/messages", **fields):
    body = {"model": WRITER, "max_tokens": 8, "messages": messages} | fields
    async with client.post(path, json=body, headers=VERSION) as reply:
        return reply, await reply.json()


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([results("a")], "messages[0].content[0].tool_use_id"),
        ([HELLO, called("a"), results("b")], "messages[2].content[0].tool_use_id"),
        ([HELLO, called("a"), results("a", "a")], "messages[2].content[1].tool_use_id"),
        ([HELLO, called("a", "a"), results("a")], "messages[1].content[1].id"),
        ([HELLO, called("a"), results("a"), called("a")], "messages[3].content[0].id"),
        ([{"role": "user", "content": ""}], "messages[0].content"),
        ([HELLO, {"role": "user", "content": []}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "text", "text": " \n"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "document", "source": {}}]}], "messages[0].content[0]"),
    ],
)
async def test_turns_that_anthropic_refuses_are_named(store, messages, place):
    async with writing(store) as (client, _, engine):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            reply, body = await send(client, *messages, path=path)
            assert (reply.status, body["error"]["param"]) == (400, place)
        assert not engine.jobs


async def test_consecutive_turns_of_one_role_are_one_turn(store):
    short, kind = {"role": "system", "content": "Be short."}, {"role": "system", "content": "Be kind."}
    async with writing(store) as (client, _, engine):
        await send(client, {"role": "user", "content": "Hello!\n\nWho are you?"}, system="Be short.\n\nBe kind.")
        await send(client, short, kind, HELLO, {"role": "user", "content": "Who are you?"})
        one, two = (job.tokens for job in engine.jobs)
    assert one == two


async def test_tools_that_only_anthropic_runs_are_passed_over_and_named(store):
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    shell = {"type": "bash_20250124", "name": "bash"}
    async with writing(store) as (client, _, engine):
        reply, body = await send(client, HELLO, tools=[search, WEATHER, shell])
        assert body["content"] == [{"type": "text", "text": "One two three."}]
        assert reply.headers["X-NPU-Node-Ignored"] == "tools.bash_20250124, tools.web_search_20250305"
        await send(client, HELLO, tools=[WEATHER])
        with_search, without = (job.tokens for job in engine.jobs)
        assert with_search == without
        reply, body = await send(client, HELLO, tools=[search], tool_choice={"type": "tool", "name": "web_search"})
        assert (reply.status, body["error"]["param"]) == (400, "tool_choice")


async def test_every_reply_to_anthropics_clients_has_their_request_id_and_form(store):
    async with writing(store) as (client, *_):
        for path, status in (("/v1/models", 200), ("/v1/models/none", 404), ("/v1/models?limit=0", 400)):
            async with client.get(path, headers=VERSION) as reply:
                body = await reply.json()
            assert reply.status == status
            assert reply.headers["request-id"] == reply.headers["X-Request-ID"]
            assert reply.headers["request-id"].startswith("req_")
            assert status == 200 or body["type"] == "error"
        async with client.get("/v1/models/none") as reply:
            assert "request-id" not in reply.headers
            assert "type" not in await reply.json()


async def test_replies_pass_the_strict_types_of_anthropics_client(store):
    async with (
        writing(store) as (client, *_),
        anthropic.AsyncAnthropic(
            base_url=str(client.make_url("")), api_key="unused", max_retries=0, _strict_response_validation=True
        ) as sdk,
    ):
        (listed,) = (await sdk.models.list()).data
        assert (listed.id, listed.lifecycle, listed.deprecated_at) == (WRITER, "active", None)
        reply = await sdk.messages.create(model=WRITER, max_tokens=8, messages=[HELLO])
        assert (reply.content[0].text, reply.stop_reason) == ("One two three.", "end_turn")
