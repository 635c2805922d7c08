"""Stored responses over HTTP: the whole application with a real tokenizer, and an engine that a test tells its text."""

import asyncio
import json

import pytest

from tests.support.application import application, built_models, with_engine
from tests.support.task_engine import TaskEngine
from worker_node.core.errors import EngineUnavailable
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.settings import NodeSettings
from worker_node.tasks.generate.messages import TokenDelta

WRITER = "smollm2-135m-instruct"
URL = "/v1/responses"


class Engine(TaskEngine):
    """Writes `text`, then fails or waits if it is told to; keeps the prompts."""

    status = EngineStatus(EngineState.READY)

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.text = "Hello there"
        self.failure = None
        self.finish = "stop"
        self.hold = asyncio.Event()
        self.hold.set()
        self.prompts = []

    async def generate(self, job):
        self.prompts.append(self.tokenizer.detokenizer().push(memoryview(job.tokens).cast("i").tolist()))
        for token in self.tokenizer.encode_prompt(self.text):
            yield TokenDelta(1, [token])
        await self.hold.wait()
        if self.failure is not None:
            raise self.failure
        yield TokenDelta(1, [], self.finish)


@pytest.fixture(scope="module")
def model(store):
    return built_models(store, WRITER)[0]


@pytest.fixture
def engine(model):
    return Engine(model.tokenizer)


@pytest.fixture
async def client(model, engine):
    async with application([with_engine(model, engine)]) as (client, _):
        yield client


async def create(client, body=None, key=None, **fields):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": WRITER, "input": "Hi"} | (body or {}) | fields
    async with client.post(URL, json=body, headers=headers) as reply:
        if not fields.get("stream"):
            return reply.status, await reply.json()
        return reply.status, [json.loads(line[6:]) async for line in reply.content if line.startswith(b"data: ")]


async def ask(client, method, path, key=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with client.request(method, f"{URL}/{path}", headers=headers) as reply:
        return reply.status, await reply.json()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_stored_as_it_was_sent(client, stream):
    _, made = await create(client, stream=stream)
    whole = made[-1]["response"] if stream else made
    assert whole["store"] is True
    assert await ask(client, "GET", whole["id"]) == (200, whole)
    assert await ask(client, "DELETE", whole["id"]) == (200, {"id": whole["id"], "object": "response", "deleted": True})
    for method, path in [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")]:
        status, body = await ask(client, method, whole["id"] + path)
        assert status == 404
        assert body["error"]["code"] == "response_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_has_the_turns_before_it(client, engine, stream):
    _, first = await create(client, input="One?", instructions="Only now.")
    engine.text = "Second answer"
    _, made = await create(client, input="Two?", previous_response_id=first["id"], stream=stream)
    second = made[-1]["response"] if stream else made
    assert second["previous_response_id"] == first["id"]
    await ask(client, "DELETE", first["id"])
    _, third = await create(client, input="Three?", previous_response_id=second["id"])
    turns = ["One?", "Hello there", "Two?", "Second answer", "Three?"]
    places = [engine.prompts[-1].index(turn) for turn in turns]
    assert places == sorted(places)
    assert "Only now." in engine.prompts[0]
    assert not any("Only now." in prompt for prompt in engine.prompts[1:])
    _, listed = await ask(client, "GET", third["id"] + "/input_items?order=asc")
    assert ["".join(part["text"] for part in item["content"]) for item in listed["data"]] == turns


async def test_items_are_referred_to_by_id(client, engine):
    _, first = await create(client, input="One?")
    references = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"id": first["output"][0]["id"]}]
    for reference in references:
        status, _ = await create(
            client, input=[{"role": "user", "content": "One?"}, reference, {"role": "user", "content": "Go on"}]
        )
        assert status == 200
        assert "Hello there" in engine.prompts[-1]
    status, body = await create(
        client, input=[{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_0"}]
    )
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "response_not_found", "input[1]")
    assert "msg_0" in body["error"]["message"]


async def test_a_call_and_its_result_by_reference(client, engine):
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    engine.text = '<tool_call>[{"name": "add", "arguments": {"a": 17}}]</tool_call>'
    _, first = await create(client, tools=[tool])
    (call,) = first["output"]
    result = {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": [{"type": "input_text", "text": "42!"}],
    }
    for body in (
        {"previous_response_id": first["id"], "input": [result]},
        {"input": [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": call["id"]}, result]},
    ):
        status, _ = await create(client, body, tools=[tool])
        assert status == 200
        assert "17" in engine.prompts[-1]
        assert "42!" in engine.prompts[-1]


async def test_a_call_that_was_cut_does_not_spoil_the_next_turn(client, engine):
    engine.text, engine.finish = '<tool_call>[{"name": "add", "arguments": {"a": 1', "length"
    _, first = await create(client, tools=[{"type": "function", "name": "add"}])
    assert (first["status"], first["output"][0]["status"]) == ("incomplete", "incomplete")
    status, _ = await create(client, previous_response_id=first["id"])
    assert status == 200


async def test_what_is_not_to_be_stored_is_not(client):
    _, made = await create(client, store=False)
    assert made["store"] is False
    assert (await ask(client, "GET", made["id"]))[0] == 404
    status, body = await create(client, previous_response_id=made["id"])
    assert (status, body["error"]["param"]) == (404, "previous_response_id")


async def test_a_store_that_is_off_stores_nothing_and_says_so(model, engine):
    async with application([with_engine(model, engine)], NodeSettings(stored_responses=0)) as (client, _):
        async with client.post(URL, json={"model": WRITER, "input": "Hi", "store": True}) as reply:
            made = await reply.json()
            assert reply.headers["X-NPU-Node-Ignored"] == "store"
        assert (reply.status, made["store"]) == (200, False)
        status, body = await create(client, previous_response_id=made["id"])
        assert status == 404
        assert "stored_responses" in body["error"]["message"]


async def test_each_key_sees_its_own(model, engine):
    settings = NodeSettings(api_keys=("ann", "bob"))
    async with application([with_engine(model, engine)], settings) as (client, _):
        _, made = await create(client, key="ann")
        assert (await ask(client, "GET", made["id"], "ann"))[0] == 200
        item = {"type": "item_reference", "id": made["output"][0]["id"]}
        assert (await ask(client, "GET", made["id"], "bob"))[0] == 404
        assert (await ask(client, "DELETE", made["id"], "bob"))[0] == 404
        assert (await ask(client, "GET", made["id"]))[0] == 401
        assert (await create(client, key="bob", previous_response_id=made["id"]))[0] == 404
        assert (await create(client, key="bob", input=[item]))[0] == 404
        assert (await create(client, key="ann", input=[item]))[0] == 200


async def test_a_response_that_fails_is_stored_as_failed(client, engine):
    engine.failure = EngineUnavailable("the engine ended")
    _, events = await create(client, stream=True)
    failed = events[-2]
    assert (failed["type"], events[-1]["type"]) == ("response.failed", "error")
    assert failed["response"]["error"] == {"code": "engine_unavailable", "message": "the engine ended"}
    _, stored = await ask(client, "GET", failed["response"]["id"])
    assert (stored["status"], stored["output"][0]["status"]) == ("failed", "incomplete")
    engine.failure = None
    status, _ = await create(client, previous_response_id=stored["id"])
    assert status == 200


async def test_a_response_that_is_being_made(client, engine):
    engine.hold.clear()
    async with client.post(URL, json={"model": WRITER, "input": "Hi", "stream": True}) as reply:
        await reply.content.readline()
        made = json.loads((await reply.content.readline())[6:])["response"]
        assert (await ask(client, "GET", made["id"]))[1]["status"] == "in_progress"
        status, body = await create(client, previous_response_id=made["id"])
        assert (status, body["error"]["param"]) == (400, "previous_response_id")
        # Deleted while it is made: its end does not bring it back.
        await ask(client, "DELETE", made["id"])
        engine.hold.set()
        await reply.read()
    assert (await ask(client, "GET", made["id"]))[0] == 404


async def test_a_response_whose_client_left_is_cancelled(client, engine):
    engine.hold.clear()
    reply = await client.post(URL, json={"model": WRITER, "input": "Hi", "stream": True})
    await reply.content.readline()
    made = json.loads((await reply.content.readline())[6:])["response"]
    reply.close()
    for _ in range(1000):
        if (stored := (await ask(client, "GET", made["id"]))[1])["status"] != "in_progress":
            break
    assert stored["status"] == "cancelled"


async def test_input_items_come_in_pages(client):
    turns = [{"role": "user", "content": f"Turn {n}"} for n in range(5)]
    _, made = await create(client, input=turns)
    _, newest = await ask(client, "GET", made["id"] + "/input_items?limit=2")
    assert [item["content"] for item in newest["data"]] == ["Turn 4", "Turn 3"]
    assert newest["has_more"] is True
    _, rest = await ask(client, "GET", f"{made['id']}/input_items?after={newest['last_id']}")
    assert [item["content"] for item in rest["data"]] == ["Turn 2", "Turn 1", "Turn 0"]
    assert rest["has_more"] is False
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        assert (await ask(client, "GET", f"{made['id']}/input_items?{query}"))[0] == 400
    assert (await ask(client, "GET", f"{made['id']}?stream=true"))[0] == 400
