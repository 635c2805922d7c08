"""SmolLM2 on the continuous-batching engine, over HTTP."""

import asyncio
import json

import pytest

pytestmark = pytest.mark.real

PARIS = {"prompt": "What is the capital of France?", "max_new_tokens": 40}


@pytest.fixture(scope="session")
def node(whole_node):
    """What is asked here is answered in words."""
    return whole_node


async def ask(http, node, **body):
    async with http.post(node.url + "/inference", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def stream(http, node, **body):
    """The text pieces and the last event of a streamed answer."""
    pieces, last = [], None
    async with http.post(node.url + "/inference", json={**body, "stream": True}) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        assert reply.headers["X-NPU-Node-Device"] == "CPU"
        event = None
        async for line in reply.content:
            if line.startswith(b"event: "):
                event = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                data = json.loads(line[6:])
                if event == "token":
                    pieces.append(data["text"])
                else:
                    last = (event, data)
    return pieces, last


async def test_the_capital_of_france_is_paris(node, http):
    answer = await ask(http, node, **PARIS)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 37
    assert 0 < answer["timing_ms"]["first_token"] <= answer["timing_ms"]["total"]
    assert answer["npu_busy_delta_us"] is None


async def test_streamed_alone_or_beside_others_the_answer_is_the_same(node, http):
    alone = await ask(http, node, **PARIS)
    pieces, (event, done) = await stream(http, node, **PARIS)
    assert event == "done"
    assert "".join(pieces) == alone["text"]
    assert len(pieces) > 5
    assert done["usage"] == alone["usage"]
    assert "text" not in done
    others = [ask(http, node, prompt=f"Count from {i} to {i + 20}.", max_new_tokens=40) for i in range(15)]
    beside, *rest = await asyncio.gather(ask(http, node, **PARIS), *others)
    assert beside["text"] == alone["text"]
    assert beside["usage"] == alone["usage"]
    assert all(answer["usage"]["completion_tokens"] for answer in rest)


async def test_limits_and_stops_end_the_answer(node, http):
    short = await ask(http, node, **PARIS | {"max_new_tokens": 3})
    assert (short["finish_reason"], short["usage"]["completion_tokens"]) == ("length", 3)
    whole = await ask(http, node, **PARIS)
    stopped = await ask(http, node, **PARIS, stop=[" Paris"])
    assert (stopped["text"], " Paris") == whole["text"].partition(" Paris")[:2]
    assert stopped["finish_reason"] == "stop"
    pieces, _ = await stream(http, node, **PARIS, stop=" Paris")
    assert "".join(pieces) == stopped["text"]


async def test_a_prompt_over_the_context_is_refused_with_the_numbers(node, http):
    for prompt in ("word " * 9000, "x" * 900_000):
        async with http.post(node.url + "/inference", json={"prompt": prompt}) as reply:
            assert reply.status == 400
            error = (await reply.json())["error"]
        assert error["code"] == "context_length_exceeded"
        assert "8192" in error["message"]
