"""Images of requests, counted by what became of them. The engine is scripted."""

import base64
import re

from tests.support.application import application
from tests.support.task_models import IMAGE, SEER, placement, request, seer
from tests.support.writing import WritingEngine

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(*urls, **more):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": SEER, "messages": [{"role": "user", "content": parts}]} | more


async def test_images_are_counted_by_outcome(store):
    damaged = "data:image/png;base64," + base64.b64encode(b"no image").decode()
    engine = WritingEngine()
    model = seer(store, [placement(SEER, engine)])
    engine.tokenizer = model.tokenizer
    async with application([model]) as (client, node):
        path, answered = request(SEER)
        async with client.post(path, **answered) as reply:
            assert reply.status == 200, await reply.text()
        for refused in (chat(IMAGE, damaged), chat(*[IMAGE] * 9), chat(IMAGE, tools=[TOOL])):
            async with client.post("/v1/chat/completions", json=refused) as reply:
                assert reply.status == 400, await reply.text()
        async with client.get("/metrics") as reply:
            text = await reply.text()
        await node.services.parts.close()
    found = re.findall(r'npu_node_images_total\{model="(\w+)",outcome="(\w+)"\} (\d+)', text)
    assert sorted(found) == [
        (SEER, "decoded", "2"),
        (SEER, "invalid_request", "10"),
        (SEER, "unsupported_parameter", "1"),
    ]
