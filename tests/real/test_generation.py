"""SmolLM2 on the continuous-batching engine, over HTTP."""

import asyncio

import pytest

from tests.real.inference import ask, stream

pytestmark = pytest.mark.real

PARIS = {"prompt": "What is the capital of France?", "max_new_tokens": 40}


@pytest.fixture(scope="session")
def node(whole_node):
    """What is asked here is answered in words."""
    return whole_node


async def streamed(http, node, **body):
    events = []
    await stream(http, node, body, lambda name, data: events.append((name, data)))
    *tokens, (last, done) = events
    assert {name for name, _ in tokens} == {"token"}
    assert last == "done"
    return [data["text"] for _, data in tokens], done


async def test_the_capital_of_france_is_paris(node, http):
    _, answer = await ask(http, node, PARIS)
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 37
    assert 0 < answer["timing_ms"]["first_token"] <= answer["timing_ms"]["total"]
    assert answer["npu_busy_delta_us"] is None


async def test_streamed_alone_or_beside_others_the_answer_is_the_same(node, http):
    _, alone = await ask(http, node, PARIS)
    pieces, done = await streamed(http, node, **PARIS)
    assert "".join(pieces) == alone["text"]
    assert len(pieces) > 5
    assert done["usage"] == alone["usage"]
    assert "text" not in done
    others = [{"prompt": f"Count from {i} to {i + 20}.", "max_new_tokens": 40} for i in range(15)]
    answers = await asyncio.gather(*(ask(http, node, body) for body in (PARIS, *others)))
    beside, *rest = (answer for _, answer in answers)
    assert beside["text"] == alone["text"]
    assert beside["usage"] == alone["usage"]
    assert all(answer["usage"]["completion_tokens"] for answer in rest)


async def test_limits_and_stops_end_the_answer(node, http):
    _, short = await ask(http, node, PARIS | {"max_new_tokens": 3})
    assert (short["finish_reason"], short["usage"]["completion_tokens"]) == ("length", 3)
    _, whole = await ask(http, node, PARIS)
    _, stopped = await ask(http, node, PARIS | {"stop": [" Paris"]})
    assert (stopped["text"], " Paris") == whole["text"].partition(" Paris")[:2]
    assert stopped["finish_reason"] == "stop"
    pieces, _ = await streamed(http, node, **PARIS, stop=" Paris")
    assert "".join(pieces) == stopped["text"]
