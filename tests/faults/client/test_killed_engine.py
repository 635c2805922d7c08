"""The engine of the only node dies in the middle of streams, over real sockets: who waits for its restart, and who not.

A node tells it by an error event without a Retry-After, so each call here waits for the second that the client then
keeps from asking again.
"""

import asyncio

import pytest
from aiohttp import web

from backend_client import (
    ClientOptions,
    CloudClient,
    CloudSettings,
    InferenceClient,
    NPUClient,
    NPUUnavailableError,
)
from backend_client.options import RetryOptions
from tests.faults.chat_node import ChatNode, choice, chunk
from tests.faults.scripted_node import ANSWER, ScriptedNode, data_event, sse

TEXT = "".join(ANSWER)
QUESTION = [{"role": "user", "content": "Where?"}]
DIED = {"error": {"message": "it died", "type": "server_error", "code": "engine_unavailable", "param": None}}
ENOUGH = ClientOptions(retry=RetryOptions(initial=10.0))


class Killed:
    """A node whose engine dies under the first `deaths` requests for an answer, after one token of each."""

    def __init__(self):
        self.node, self.chat = ScriptedNode(), ChatNode()
        self.node.more_routes = self.chat.routes()
        self.node.respond = self.chat.respond = self.respond
        self.deaths = 0
        self.died = asyncio.Event()

    async def respond(self, request):
        if not self.deaths or request.path == "/tokenize":
            return None
        self.deaths -= 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if request.path == "/inference":
            await response.write(sse("token", {"text": "The"}) + sse("error", DIED))
        else:
            await response.write(data_event(chunk([choice({"content": "The"})])) + data_event(DIED))
        await response.write_eof()
        if not self.deaths:
            self.died.set()
        return response

    @property
    def asked(self):
        """How many requests for an answer there were."""
        return len(self.node.requests) + len(self.chat.bodies)


@pytest.fixture
async def killed():
    node = Killed()
    async with node.node.running():
        yield node


async def test_answers_that_nobody_has_seen_are_made_again_and_new_calls_are_not_refused(killed):
    async with NPUClient([killed.node.url], options=ENOUGH) as client:
        await client.health()
        killed.deaths = 2
        lost = [
            asyncio.ensure_future(client.generate("prompt", timeout=30)),
            asyncio.ensure_future(client.chat(QUESTION, timeout=30)),
        ]
        await killed.died.wait()
        # The client has read the end of both streams when the first of them may be sent again at the earliest.
        results = await asyncio.gather(*lost, client.generate("new", timeout=30), client.chat(QUESTION, timeout=30))
    assert [result.text for result in results] == [TEXT] * 4
    assert all([tried.code for tried in result.attempts] == ["engine_unavailable", None] for result in results[:2])
    assert killed.asked == 6


async def test_the_deadline_bounds_the_wait(killed):
    async with NPUClient([killed.node.url], options=ENOUGH) as client:
        await client.health()
        killed.deaths = 1
        with pytest.raises(NPUUnavailableError) as caught:
            await client.generate("prompt", timeout=0.9)
    assert [tried.code for tried in caught.value.attempts] == ["engine_unavailable"]
    assert caught.value.retry_after is not None
    assert killed.asked == 1


async def test_where_a_cloud_takes_over_nothing_waits(killed, cloud):
    settings = CloudSettings(base_url=cloud.url, api_key="sk-cloud", chat_model="cloud-chat")
    fleet = NPUClient([killed.node.url], options=ENOUGH)
    async with InferenceClient(fleet, CloudClient(settings)) as client:
        await client.npu.health()
        killed.deaths = 1
        result = await client.generate("prompt", timeout=30)
        assert [tried.outcome for tried in result.attempts] == ["NodeNotServing", "ok"]
        assert (result.source, killed.asked) == ("cloud", 1)


async def test_a_call_that_must_stay_local_waits_though_there_is_a_cloud(killed, cloud):
    settings = CloudSettings(base_url=cloud.url, api_key="sk-cloud", chat_model="cloud-chat")
    fleet = NPUClient([killed.node.url], options=ENOUGH)
    async with InferenceClient(fleet, CloudClient(settings)) as client:
        await client.npu.health()
        killed.deaths = 2
        kept = [
            client.generate("prompt", timeout=30, local_only=True),
            # The cloud has no such model.
            client.chat(QUESTION, timeout=30, model="smollm2-135m-instruct"),
        ]
        assert [(result.source, result.text) for result in await asyncio.gather(*kept)] == [("npu", TEXT)] * 2
    assert not cloud.requests
