"""Reranking, speech and vision wherever a node tells of its models and of what they did, over HTTP.

Engines are scripted; that a model with vision is listed as such is in `tests/real/test_vision.py`.
"""

import base64
import re

import numpy as np
import pytest

from tests.support.application import application
from tests.support.scripted_runner import result_of
from tests.support.task_models import IMAGE, MODELS, SEER, placement, request
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta

# What one request of `task_models.request` gives: two documents, half a second of sound, four tokens.
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Engine:
    """Answers whatever it is asked, in this process."""

    ready = True
    recoveries = 0
    status = EngineStatus(EngineState.READY, None)

    async def run(self, job, _result):
        if isinstance(job, GenerateJob):
            yield TokenDelta(job.id, np.frombuffer(job.tokens, "<i4").tolist()[:4], "stop")
        else:
            yield result_of(job)


@pytest.fixture
async def client(store):
    models = [make(store, [placement(name, Engine())]) for name, make in MODELS.items()]
    async with application(models) as (made, node):
        for name in MODELS:
            path, body = request(name)
            async with made.post(path, **body) as reply:
                assert reply.status == 200, await reply.text()
                assert reply.headers["X-NPU-Node-Route-Reason"] == "preferred"
        yield made
        await node.services.parts.close()


async def get(client, path):
    async with client.get(path) as reply:
        assert reply.status == 200
        return await reply.json() if "json" in reply.content_type else await reply.text()


async def test_images_are_counted_by_outcome(client):
    def chat(data, **more):
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in data]
        return {"model": SEER, "messages": [{"role": "user", "content": parts}]} | more

    damaged = "data:image/png;base64," + base64.b64encode(b"no image").decode()
    path = "/v1/chat/completions"
    for refused in (chat([IMAGE, damaged]), chat([IMAGE] * 9), chat([IMAGE], tools=[TOOL])):
        async with client.post(path, json=refused) as reply:
            assert reply.status == 400, await reply.text()
    found = re.findall(r'npu_node_images_total\{model="(\w+)",outcome="(\w+)"\} (\d+)', await get(client, "/metrics"))
    assert sorted(found) == [
        (SEER, "decoded", "2"),
        (SEER, "invalid_request", "10"),
        (SEER, "unsupported_parameter", "1"),
    ]
