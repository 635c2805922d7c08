"""A node from its start to every kind of end, with real engines under load."""

import asyncio
import os
import signal
import time

import aiohttp
import psutil
import pytest

from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store")]


def test_sigterm_drains(quick_models):
    """Ready → 503 first, admitted work finishes, new work is refused, all within 30 s and with exit status 0."""
    # More than 5 s: a model loads.

    async def drain(node):
        async with aiohttp.ClientSession() as http:
            body = {"prompt": "Write a story.", "max_new_tokens": 30, "ignore_eos": True}

            async def generate():
                async with http.post(node.url + "/inference", json=body) as reply:
                    return reply.status, await reply.json()

            (engine,) = node.engine_pids().values()
            # Stopped, so that the answer is not over before all has been asked.
            os.kill(engine, signal.SIGSTOP)
            running = asyncio.create_task(generate())
            await asyncio.to_thread(node.wait_for, lambda health: health["models"][0]["in_flight"] == 1)
            node.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                while True:
                    async with http.get(node.url + "/health/ready") as reply:
                        if reply.status == 503:
                            assert (await reply.json())["status"] == "draining"
                            break
            async with http.post(node.url + "/inference", json={"prompt": "late"}) as reply:
                assert reply.status == 503
                assert (await reply.json())["error"]["code"] == "draining"
            os.kill(engine, signal.SIGCONT)
            status, answer = await running
            assert status == 200
            assert answer["usage"]["completion_tokens"] == 30

    with start_node(NPU_NODE_MODELS='[{"name": "smollm2-135m-instruct"}]', **quick_models) as node:
        engines = list(node.engine_pids().values())
        asyncio.run(drain(node))
        began = time.monotonic()
        assert node.process.wait(30) == 0
        assert time.monotonic() - began < 30
        assert not any(psutil.pid_exists(pid) for pid in engines)


@pytest.mark.parametrize("when", ["loading", "serving"])
def test_kill_9_of_the_node_leaves_no_process_and_no_file(tmp_path, quick_models, when):
    environment = {"TMPDIR": str(tmp_path)} | quick_models
    with start_node(ready=when == "serving", **environment) as node:
        if when == "loading":
            node.wait_for(lambda body: all(model["engines"][0]["pid"] for model in body["models"]))
        children = psutil.Process(node.process.pid).children(recursive=True)
        assert len(children) >= 2
        node.process.kill()
        node.process.wait()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
    assert not list(tmp_path.iterdir())
