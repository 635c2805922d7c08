"""Reranking, speech and vision wherever a node tells of its models and of what they did, over HTTP.

Engines are scripted; that a model with vision is listed as such is in `tests/real/test_vision.py`.
"""

import base64
import re

import numpy as np
import pytest

from tests.support.application import application
from tests.support.task_models import HEARER, IMAGE, MODELS, RANKER, SEER, placement, request
from tests.support.task_runner import result_of
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta

# What one request of `task_models.request` gives: two documents, half a second of sound, four tokens.
COUNTERS = {
    RANKER: {"npu_node_reranked_documents_total": 2.0},
    HEARER: {"npu_node_audio_seconds_total": 0.5, "npu_node_audio_skipped_seconds_total": 0.0},
    SEER: {
        "npu_node_generation_tokens_total": 4.0,
        "npu_node_time_to_first_token_seconds_count": 1.0,
        "npu_node_images_total": 1.0,
        "npu_node_image_bytes_total": len(base64.b64decode(IMAGE.partition(",")[2])),
    },
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
REMOTE = "https://images.test/a.png"


class Engine:
    """Answers whatever it is asked, in this process."""

    ready = True
    status = EngineStatus(EngineState.READY, None)

    async def run(self, job, _result):
        if isinstance(job, GenerateJob):
            yield TokenDelta(job.id, np.frombuffer(job.tokens, "<i4").tolist()[:4], "stop")
        else:
            yield result_of(job)


@pytest.fixture
async def client(store):
    """A node that has answered one request of each task."""
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


async def test_the_metrics_that_rules_and_dashboards_read_count_each(client):
    found = {}
    for line in (await get(client, "/metrics")).splitlines():
        if match := re.fullmatch(r'(\w+)\{(.*model="(\w+)".*)\} (\S+)', line):
            name, labels, model, value = match.groups()
            found.setdefault(model, {}).setdefault(name, []).append((labels, float(value)))
    for name, counters in COUNTERS.items():
        for counter, value in counters.items():
            assert [count for _, count in found[name][counter]] == [value], counter
        for counter in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"):
            assert [count for _, count in found[name][f"npu_node_{counter}_count"]] == [1.0], (name, counter)
        bounds = [labels for labels, _ in found[name]["npu_node_e2e_request_latency_seconds_bucket"]]
        assert any('le="2.5"' in labels for labels in bounds), "the objective of reranking is one of them"
        assert [count for _, count in found[name]["npu_node_routes_total"]] == [1.0]
    assert 'npu_node_http_requests_total{route="/v2/rerank",status="200"} 1.0' in await get(client, "/metrics")


async def test_images_are_counted_by_source_and_outcome_and_explanations_count_none(client):
    def chat(data, **more):
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in data]
        return {"model": SEER, "messages": [{"role": "user", "content": parts}]} | more

    damaged = "data:image/png;base64," + base64.b64encode(b"no image").decode()
    path = "/v1/chat/completions"
    for refused in (chat([IMAGE, damaged]), chat([IMAGE] * 9), chat([IMAGE], tools=[TOOL]), chat([REMOTE])):
        async with client.post(path, json=refused) as reply:
            assert reply.status == 400, await reply.text()
    for status, body in ((200, chat([IMAGE])), (400, chat([damaged]))):
        async with client.post("/route/explain", json={"path": path, "body": body}) as reply:
            assert reply.status == status
    found = re.findall(
        r'npu_node_images_total\{model="(\w+)",outcome="(\w+)",source="(\w+)"\} (\d+)', await get(client, "/metrics")
    )
    assert sorted(found) == [
        (SEER, "decoded", "inline", "2"),
        (SEER, "invalid_request", "inline", "10"),
        (SEER, "invalid_request", "remote", "1"),
        (SEER, "unsupported_parameter", "inline", "1"),
    ]
