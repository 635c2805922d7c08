"""Five models on a node with memory for about four, asked for at random; --long asks for ten minutes."""

import asyncio
import json
import os
import random
import shutil
import time
from pathlib import Path

import aiohttp
import pytest

from tests.support.nodes import start_node
from worker_node.devices.memory import resident_memory
from worker_node.models.directory import MANIFEST_FILE

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
MODELS = {EMBEDDER: EMBEDDER, "texts-a": EMBEDDER, "texts-b": EMBEDDER, WRITER: WRITER, "writer-a": WRITER}
BUDGET = 1_150_000_000
CALLERS = 4


@pytest.fixture
def copies(quick_models):
    """A store with two models and copies of them under other names; their weights are links."""
    quick = Path(quick_models["NPU_NODE_MODEL_STORE"])
    root = quick.with_name(f"five-models-{os.getpid()}")
    for name, source in MODELS.items():
        shutil.copytree(quick / source, root / name, copy_function=os.link)
        manifest = json.loads((root / name / MANIFEST_FILE).read_bytes())
        (root / name / MANIFEST_FILE).unlink()
        (root / name / MANIFEST_FILE).write_text(json.dumps(manifest | {"id": name}))
    yield root
    shutil.rmtree(root)


async def random_requests(url, number, until, answered):
    rng = random.Random(number)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180)) as http:
        # Five do not fit, so each has answered only after evictions.
        while time.monotonic() < until or len(set(answered)) < len(MODELS):
            name, source = rng.choice(list(MODELS.items()))
            path, body = "/v1/embeddings", {"input": ["a text"] * rng.randint(1, 16)}
            if source == WRITER:
                path, body = "/v1/completions", {"prompt": "word " * rng.randint(1, 200), "max_tokens": 8}
            async with http.post(url + path, json=body | {"model": name}) as reply:
                told = await reply.json()
                if reply.status == 200:
                    answered.append(name)
                else:
                    # A refusal that says why, and when to come again, is no loss.
                    assert reply.status == 503, told
                    assert told["error"]["code"] in {"insufficient_memory", "model_loading"}, told
                    assert "Retry-After" in reply.headers
            await asyncio.sleep(rng.choice([0.0, 0.1, 1.0]))


async def most_memory(url, most):
    """Measure the memory of all engines, four times a second."""
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(url + "/health") as reply:
                models = (await reply.json())["models"]
            pids = [engine["pid"] for model in models for engine in model["engines"] if engine["pid"]]
            most.append(sum(resident_memory(pid) or 0 for pid in pids))
            await asyncio.sleep(0.25)


def test_random_requests_for_five_models_lose_none_and_keep_the_budget(copies, long):
    # More than 5 s: engines are loaded and evicted over and over.
    async def ask(url):
        until = time.monotonic() + (600 if long else 6)
        watch = asyncio.create_task(most_memory(url, most))
        await asyncio.gather(*(random_requests(url, number, until, answered) for number in range(CALLERS)))
        watch.cancel()

    answered, most = [], []
    settings = {"NPU_NODE_MODELS": "[]", "NPU_NODE_MEMORY_BUDGET": str(BUDGET)}
    with start_node(ready=False, NPU_NODE_MODEL_STORE=str(copies), **settings) as node:
        asyncio.run(ask(node.url))
    assert max(most) <= 1.1 * BUDGET
