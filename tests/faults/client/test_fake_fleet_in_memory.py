"""The fleet of test doubles without sockets: the same clients, the same faults."""

import socket

import pytest

from backend_client import NPUUnavailableError, StreamInterrupted
from backend_client.errors import NotOffered
from backend_client.testing import FakeFleet, cut, drop, fake_vector, hang, status

QUESTION = [{"role": "user", "content": "Where?"}]


@pytest.fixture
def fleet(monkeypatch):
    def refuse(*_):
        raise AssertionError("a socket was connected")

    with FakeFleet(2, memory=True) as running:
        monkeypatch.setattr(socket.socket, "connect", refuse)
        yield running


async def test_every_call_is_served_without_a_socket(fleet):
    async with fleet.async_client(api_key="key") as client:
        assert await client.embed("text") == fake_vector("text").tolist()
        assert (await client.generate("prompt")).text == "The capital is Paris."
        assert [piece async for piece in client.stream("prompt")] == ["The ", "capital ", "is ", "Paris."]
        assert (await client.chat(QUESTION)).text == "The capital is Paris."
        assert await client.count_tokens("two words") == 2
        assert (await client.rerank("paris", ["Bonn", "in Paris"])).documents[0].index == 1
        assert (await client.transcribe(b"RIFF")).text == "It is raining in Paris."
    assert fleet.assert_sent("/embeddings", times=1, texts=["text"]).headers["authorization"] == "Bearer key"


def test_a_blocking_client_reaches_it(fleet):
    with fleet.client() as client:
        assert client.embed("text") == fake_vector("text").tolist()
        assert client.with_options(timeout=5).chat(QUESTION).text == "The capital is Paris."


@pytest.mark.parametrize("fault", [status(503, "engine_unavailable"), drop(), status(429, "overloaded")])
async def test_a_fault_of_one_node_is_answered_by_the_other(fleet, fault):
    async with fleet.async_client() as client:
        await client.health()
        fleet[0].script(fault)
        while len((reply := await client.embed_result("text")).attempts) == 1:
            assert reply.node == fleet[1].url
        assert [attempt.node for attempt in reply.attempts] == fleet.urls
        assert reply.vector == fake_vector("text").tolist()


async def test_a_stream_that_breaks_keeps_its_text(fleet):
    for node in fleet:
        node.script(cut(2))
    async with fleet.async_client() as client:
        with pytest.raises(StreamInterrupted) as caught:
            [piece async for piece in client.stream("prompt")]
    assert caught.value.partial_text == "The capital "


async def test_a_hung_node_costs_no_more_than_the_deadline(fleet):
    for node in fleet:
        node.script(hang(), hang())
    async with fleet.async_client() as client:
        with pytest.raises(NPUUnavailableError):
            await client.embed("text", timeout=0.1)


async def test_a_killed_node_gets_nothing_and_breaks_its_streams(fleet):
    async with fleet.async_client() as client:
        stream = client.stream("prompt")
        assert await anext(stream) == "The "
        serving = fleet.assert_sent("/inference", times=1).node
        fleet.kill(fleet.urls.index(serving))
        with pytest.raises(StreamInterrupted):
            async for _ in stream:
                pass
        assert (await client.embed_result("text")).node != serving
        fleet.kill(1 - fleet.urls.index(serving))
        with pytest.raises(NPUUnavailableError):
            await client.embed("text", timeout=2)


async def test_a_node_without_a_model_for_it_is_sent_nothing(fleet):
    for node in fleet:
        node.offers = {"embedding"}
    async with fleet.async_client() as client:
        for call in (client.rerank("q", ["a"]), client.transcribe(b"RIFF")):
            with pytest.raises(NotOffered):
                await call
    fleet.assert_nothing_sent()


async def test_calls_take_turns_as_over_sockets(fleet):
    async with fleet.async_client() as client:
        first, second = client.stream("prompt"), client.stream("prompt")
        assert await anext(first) == await anext(second) == "The "
        assert [piece async for piece in first] == [piece async for piece in second]


def test_what_needs_sockets_says_so(fleet):
    for method in (fleet.settings, fleet.environment):
        with pytest.raises(RuntimeError, match="on sockets"):
            method()
