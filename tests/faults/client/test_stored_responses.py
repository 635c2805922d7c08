"""A later turn goes to the node that stores the earlier one, whoever made that."""

import json

import openai as sdk
import pytest
from aiohttp import web

import backend_client
from backend_client import ClientSettings, NPUClient
from tests.faults.scripted_node import WRITER, ScriptedNode, error_response


class Responses:
    """The routes of stored responses of a scripted node."""

    def __init__(self, name):
        self.name = name
        self.stored = {}

    def routes(self):
        return [web.post("/v1/responses", self._create), web.get("/v1/responses/{id}", self._get)]

    async def _create(self, request):
        body = await request.json()
        earlier = body.get("previous_response_id")
        if earlier is not None and earlier not in self.stored:
            return error_response(404, "response_not_found", f"{self.name} has no {earlier}")
        response = {
            "id": f"resp_{self.name}_{len(self.stored)}",
            "object": "response",
            "created_at": 1,
            "model": WRITER,
            "status": "completed",
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4},
        }
        self.stored[response["id"]] = response
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Model": WRITER})
        await reply.prepare(request)
        delta = {"type": "response.output_text.delta", "delta": "Hi", "item_id": "m", "output_index": 0}
        for event in (
            {"type": "response.created", "response": response | {"status": "in_progress"}},
            delta | {"content_index": 0, "logprobs": []},
            {"type": "response.completed", "response": response},
        ):
            await reply.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        await reply.write_eof()
        return reply

    async def _get(self, request):
        found = self.stored.get(request.match_info["id"])
        return web.json_response(found) if found else error_response(404, "response_not_found", "none")


@pytest.fixture
async def fleet():
    a, b, c = (ScriptedNode(routes=Responses(name).routes()) for name in "abc")
    async with a.running(), b.running(), c.running():
        yield [a, b, c]


@pytest.fixture
async def openai(fleet):
    async with backend_client.openai(ClientSettings(nodes=[node.url for node in fleet])) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True])
async def test_later_turns_go_where_the_earlier_one_is_stored(openai, streamed):
    for _ in range(5):
        if streamed:
            stream = await openai.responses.create(model=WRITER, input="Hello", stream=True)
            first = [event async for event in stream][-1].response
        else:
            first = await openai.responses.create(model=WRITER, input="Hello")
        second = await openai.responses.create(model=WRITER, input="And?", previous_response_id=first.id)
        assert second.id[:6] == first.id[:6]
        assert (await openai.responses.retrieve(first.id)).id == first.id


async def test_a_response_of_another_client_is_searched_for(openai, fleet):
    async with NPUClient([fleet[1].url]) as other:
        made = await other.post("/v1/responses", {"input": "Hello"})
    assert made.body["id"].startswith("resp_b")
    later = await openai.responses.create(model=WRITER, input="And?", previous_response_id=made.body["id"])
    assert later.id.startswith("resp_b")


async def test_a_response_that_no_node_has_is_the_nodes_refusal(openai):
    with pytest.raises(sdk.NotFoundError, match="resp_unknown"):
        await openai.responses.create(model=WRITER, input="And?", previous_response_id="resp_unknown")
