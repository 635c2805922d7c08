"""An engine killed from outside under many requests: all that had no first token are answered within their deadline."""

import asyncio
import collections
import os
import signal

import pytest

from tests.support.nodes import start_node

pytestmark = pytest.mark.real

CHAT, EMBEDDING = "smollm2-135m-instruct", "all-minilm-l6-v2"
DEADLINE = {"X-Request-Timeout-Ms": "60000"}


@pytest.fixture(scope="module")
def killed(quick_models):
    with start_node(**quick_models) as running:
        yield running


@pytest.mark.parametrize("victim", [CHAT, EMBEDDING])
async def test_all_that_had_no_first_token_are_answered_after_a_kill(killed, http, victim):
    # More than 5 s: the engine loads a second time.
    async def post(path, body):
        async with http.post(killed.url + path, json=body, headers=DEADLINE) as reply:
            return path, reply.status, "" if reply.status == 200 else await reply.text()

    def chat(n):
        message = {"role": "user", "content": f"Story {n}. " + "It was a dark and stormy night. " * 20}
        return post("/v1/chat/completions", {"model": CHAT, "messages": [message], "max_tokens": 2})

    def embed(n):
        # Texts of its own: known ones are answered without the engine.
        return post("/v1/embeddings", {"model": EMBEDDING, "input": [f"{victim} {n}, line {k}." for k in range(10)]})

    def held(health):
        return next(model["in_flight"] for model in health["models"] if model["id"] == victim) >= 10

    # Stopped, so that it holds them all and has answered none when it is killed.
    pid = killed.engine_pids()[victim]
    os.kill(pid, signal.SIGSTOP)
    tasks = [asyncio.create_task(chat(n)) for n in range(40)] + [asyncio.create_task(embed(n)) for n in range(20)]
    await asyncio.to_thread(killed.wait_for, held)
    os.kill(pid, signal.SIGKILL)
    outcomes = collections.Counter(await asyncio.gather(*tasks))
    assert outcomes == {("/v1/chat/completions", 200, ""): 40, ("/v1/embeddings", 200, ""): 20}
    health = await asyncio.to_thread(killed.wait_for, lambda body: body["status"] == "ready")
    assert not any(model["in_flight"] for model in health["models"])
