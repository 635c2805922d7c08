"""The dashboard's state on a real node: true while engines work and die, and silent about what was asked."""

import asyncio
import json
import os
import signal

import aiohttp
import pytest

from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store")]

WRITER = "smollm2-135m-instruct"
SECRET = "zanzibar"
STORY = f"Tell me of {SECRET}."
TURN = [{"role": "user", "content": STORY}]
STREAMS = {
    "/inference": {"prompt": STORY, "max_new_tokens": 3000, "ignore_eos": True},
    "/v1/chat/completions": {"model": WRITER, "messages": TURN, "max_tokens": 3000, "ignore_eos": True},
    "/v1/completions": {"model": WRITER, "prompt": STORY, "max_tokens": 3000, "ignore_eos": True},
    "/v1/responses": {"model": WRITER, "input": STORY, "max_output_tokens": 3000},
    "/api/chat": {"model": WRITER, "messages": TURN, "options": {"num_predict": 3000}},
    "/api/generate": {"model": WRITER, "prompt": STORY, "options": {"num_predict": 3000}},
}


async def state_of(http, node, until, headers=None):
    async with asyncio.timeout(60):
        while True:
            async with http.get(node.url + "/dashboard/state", headers=headers) as reply:
                assert reply.status == 200
                assert reply.headers["Cache-Control"] == "no-store"
                state = await reply.json()
            if until(state):
                return state
            await asyncio.sleep(0.05)


def assert_ended_by_an_error(route, text):
    """Its last event is an error of the dialect, and nothing says that the answer is whole."""
    last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
    if route == "/v1/responses":
        assert last["type"] == "error"
    else:
        assert isinstance(last["error"], str) == route.startswith("/api/")
        assert set(last) == ({"error", "code"} if route.startswith("/api/") else {"error"})
    for end in ("response.completed", "[DONE]", '"done":true'):
        assert end not in text


def test_work_failures_and_a_killed_engine_are_told_and_no_word_of_a_request():
    # More than 5 s: a node of its own starts, and its killed engine a second time.
    async def watch(node):
        async with aiohttp.ClientSession() as http:

            async def stream(route, body):
                async with http.post(node.url + route, json=body | {"stream": True}) as reply:
                    assert reply.status == 200
                    first = await reply.content.readline()
                    begun[route].set()
                    return first + await reply.read()

            begun = {route: asyncio.Event() for route in STREAMS}
            async with http.post(node.url + "/embeddings", json={"texts": [SECRET, "b"]}) as reply:
                assert reply.status == 200
            body = {"prompt": SECRET, "max_new_tokens": 3}
            async with http.post(node.url + "/inference", json=body) as reply:
                assert reply.status == 200
            async with http.post(node.url + "/inference", json={"prompt": "a", "model": SECRET}) as reply:
                assert reply.status == 404
            async with http.get(node.url + f"/{SECRET}") as reply:
                assert reply.status == 404
            working = [asyncio.create_task(stream(route, body)) for route, body in STREAMS.items()]
            for event in begun.values():
                await event.wait()
            # Tokens are counted as they come: none of these answers has ended.
            state = await state_of(http, node, lambda state: (state["history"]["output_tokens"] or [0])[-1] > 3)
            assert state["in_flight"] == len(STREAMS)
            pid = node.engine_pids()[WRITER]
            os.kill(pid, signal.SIGKILL)
            for route, answer in zip(STREAMS, await asyncio.gather(*working), strict=True):
                assert b"engine process was killed from outside" in answer
                assert_ended_by_an_error(route, answer.decode())
            state = await state_of(http, node, lambda state: len(state["failures"]) == len(STREAMS) + 2)
            engine = next(model for model in state["models"] if model["id"] == WRITER)["engines"][0]
            # It may have started again since.
            assert engine["state"] in {"backing_off", "starting"} or engine["restarts"] == 1
            recovered = await state_of(http, node, lambda state: state["status"] == "ready")
            return state, recovered

    # Whole weights: an answer of the cut model would have ended.
    with start_node() as node:
        state, recovered = asyncio.run(watch(node))
    found = {(f["code"], f["status"], f["route"], f["model"], f["device"], f["count"]) for f in state["failures"]}
    assert found == {
        *(("engine_unavailable", 503, route, WRITER, "CPU", 1) for route in STREAMS),
        ("model_not_found", 404, "/inference", None, None, 1),
        ("not_found", 404, "-", None, None, 1),
    }
    assert state["failures"][0]["code"] == "engine_unavailable"
    assert {(route["model"], route["device"], route["reason"], route["count"]) for route in state["routes"]} == {
        ("all-minilm-l6-v2", "CPU", "preferred", 1),
        (WRITER, "CPU", "preferred", 1),
    }
    assert state["requests"] == 2
    assert state["first_token_ms"]["answers"] == 1
    assert state["first_token_ms"]["p50"] > 0
    (samples,) = {len(series) for name, series in state["history"].items() if name != "period_s"}
    assert samples > 0
    assert SECRET not in json.dumps(state)
    engine = next(model for model in recovered["models"] if model["id"] == WRITER)["engines"][0]
    assert (engine["state"], engine["restarts"]) == ("ready", 1)
