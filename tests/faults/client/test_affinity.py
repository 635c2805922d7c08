"""Over sockets: the turns of a conversation go to one node, whichever way the caller came in."""

import asyncio
import logging
import re

import pytest

import backend_client
from backend_client import ConfigurationError, InferenceClient
from backend_client.testing import FakeCloud
from backend_client.testing.node import WRITER
from tests.faults.client.gateways import gateway, made_keys

TALKS, TURNS = 12, 5
SECRET = "anna's talk of 47Zq11"


def messages_of(talk, turn):
    """The messages of a conversation at a turn; all have the same system prompt."""
    texts = [{"role": "user", "content": f"question {number} of talk {talk}"} for number in range(turn + 1)]
    answers = [{"role": "assistant", "content": "It is so."}] * turn
    pairs = [part for pair in zip(texts, [*answers, None], strict=True) for part in pair if part]
    return [{"role": "system", "content": "You are brief."}, *pairs]


async def by_chat(client, talk, turn):
    return (await client.chat(messages_of(talk, turn))).node


async def by_stream(client, talk, turn):
    async with client.stream_chat(messages_of(talk, turn)) as stream:
        async for _ in stream:
            pass
    return stream.result.node


async def by_session(client, talk, turn):
    """A prompt, not a chat: what it says changes, and the header names the conversation."""
    options = {"extra_headers": {"X-Session-Id": f"talk {talk}"}}
    return (await client.generate(f"turn {turn}", **options)).node


async def nodes_of_talks(ask):
    """The nodes of each conversation; those of all conversations go on at once, turn by turn."""
    found = [[] for _ in range(TALKS)]
    for turn in range(TURNS):
        for talk in range(TALKS):
            found[talk].append(await ask(talk, turn))
    return found


def all_on_one_node(found):
    return all(len(set(nodes)) == 1 for nodes in found)


@pytest.mark.parametrize("way", [by_chat, by_stream, by_session])
async def test_each_conversation_has_one_node_and_the_fleet_has_them_all(fleet, way):
    async with fleet.async_client() as client:
        found = await nodes_of_talks(lambda talk, turn: way(client, talk, turn))
        assert all_on_one_node(found)
        assert {node for nodes in found for node in nodes} == {*fleet.urls}


async def test_without_affinity_the_load_alone_decides(fleet):
    options = backend_client.ClientOptions(affinity=False)
    async with fleet.async_client(options=options) as client:
        assert not all_on_one_node(await nodes_of_talks(lambda talk, turn: by_chat(client, talk, turn)))


async def test_the_sdk_keeps_a_prompt_cache_key_on_one_node(fleet):
    async with backend_client.openai(fleet.settings()) as openai:

        async def ask(talk, turn):
            given = {"model": WRITER, "messages": [{"role": "user", "content": f"{turn}"}]}
            await openai.chat.completions.create(**given, prompt_cache_key=f"talk {talk}")
            return fleet.requests[-1].node

        assert all_on_one_node(await nodes_of_talks(ask))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_gateway_keeps_a_conversation_on_one_node_and_counts_hits(fleet, stream):
    async with gateway(*fleet) as http:

        async def ask(talk, turn):
            body = {"model": WRITER, "messages": messages_of(talk, turn), "stream": stream}
            reply = await http.post("/v1/chat/completions", json=body)
            await reply.read()
            return reply.headers["X-NPU-Gateway-Node"]

        assert all_on_one_node(await nodes_of_talks(ask))
        metrics = await (await http.get("/metrics")).text()
        assert f'npu_client_affinity_total{{outcome="hit"}} {TALKS * (TURNS - 1)}.0' in metrics
        assert 'npu_client_affinity_total{outcome="miss"} 0.0' in metrics


async def test_teams_that_name_the_same_session_have_conversations_of_their_own(fleet, tmp_path):
    path = tmp_path / "keys.db"
    keys = made_keys(path, *(f"team-{number}" for number in range(12)))
    async with gateway(*fleet, keys=path) as http:

        async def ask(key):
            headers = {"Authorization": f"Bearer {key}", "X-Session-Id": "1"}
            body = {"model": WRITER, "messages": messages_of(0, 0)}
            reply = await http.post("/v1/chat/completions", json=body, headers=headers)
            assert reply.status == 200, await reply.text()
            return reply.headers["X-NPU-Gateway-Node"]

        found = [{await ask(key) for _ in range(3)} for key in keys]
    assert all_on_one_node(found)
    assert set.union(*found) == {*fleet.urls}


async def test_a_conversation_moves_with_its_node_and_calls_at_once_share_the_fleet(fleet):
    async with fleet.async_client() as client:
        first = await by_chat(client, 1, 0)
        fleet.kill(fleet.urls.index(first))
        try:
            moved = {await by_chat(client, 1, turn) for turn in range(1, 3)}
        finally:
            fleet.revive(fleet.urls.index(first))
        assert moved == {*fleet.urls} - {first}
        headers = {"X-Session-Id": "all the same"}
        replies = [client.chat(messages_of(talk, 0), extra_headers=headers) for talk in range(10)]
        while first not in {reply.node for reply in await asyncio.gather(*replies)}:
            replies = [client.chat(messages_of(talk, 0), extra_headers=headers) for talk in range(10)]
            await asyncio.sleep(0.1)


async def test_the_name_of_a_session_is_neither_logged_nor_sent_to_the_cloud(fleet, caplog):
    caplog.set_level(logging.DEBUG)
    with FakeCloud() as cloud:
        async with InferenceClient.from_settings(fleet.settings(), cloud=cloud.settings()) as client:
            options = {"extra_headers": {"X-Session-Id": SECRET}}
            shown = [repr(await client.chat(messages_of(0, 0), **options)), repr(client)]
            for index in range(2):
                fleet.kill(index)
            try:
                reply = await client.chat(messages_of(0, 1), **options)
            finally:
                for index in range(2):
                    fleet.revive(index)
        assert reply.source == "cloud"
        assert not [header for sent in cloud.requests for header in sent.headers if "session" in header]
        assert not re.search("47Zq11", "\n".join([*shown, caplog.text, repr(reply)]))
        with pytest.raises(ConfigurationError, match="x-session-id must not go to the cloud"):
            InferenceClient.from_settings(fleet.settings(), cloud=cloud.settings(extra_headers=["X-Session-Id"]))
