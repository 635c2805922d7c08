"""One trace from the client through the edge to the engine, on real models."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from backend_client import NPUClient, RequestRejected
from backend_client.observability import Metrics, instrument
from tests.support.nodes import start_node
from worker_node import server
from worker_node.observability.tracing import Tracing
from worker_node.settings import NodeSettings

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store"), pytest.mark.timeout(240)]

EMBEDDER, WRITER = "all-minilm-l6-v2", "smollm2-135m-instruct"
SECRET = "the butler with the candlestick"
GENERATION = {
    f"chat {WRITER}": None,
    "POST /inference": f"chat {WRITER}",
    f"chat {WRITER} at the node": "POST /inference",
    "tokenize": f"chat {WRITER} at the node",
    "route": f"chat {WRITER} at the node",
    "queue": f"chat {WRITER} at the node",
    "engine": f"chat {WRITER} at the node",
    "prefill": "engine",
    "decode": "engine",
}


@asynccontextmanager
async def traced_pair(monkeypatch, quick_models):
    """A node in this process with real engines, a client of it, and the spans of both."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("both")
    monkeypatch.setattr(server, "open_tracing", lambda *, enabled: Tracing(tracer))
    async with server.running_node(NodeSettings(port=0, model_store=quick_models["NPU_NODE_MODEL_STORE"])) as (
        node,
        url,
    ):
        for model in node.manager.models:
            await model.placements[0].settled(time.monotonic() + 100)
        async with instrument(NPUClient([url]), metrics=Metrics(CollectorRegistry()), tracer=tracer) as client:
            yield node, client, exporter


def tree(spans):
    """Each span's name with its parent's. The node's inference is called as the client's call: told apart here."""
    by_id = {span.context.span_id: span for span in spans}

    def name(span):
        parent = by_id.get(span.parent.span_id) if span.parent else None
        return f"{span.name} at the node" if parent is not None and parent.name.startswith("POST") else span.name

    return {name(span): name(by_id[span.parent.span_id]) if span.parent else None for span in spans}


async def test_calls_refusals_and_readers_who_leave_make_one_trace_of_client_and_node(monkeypatch, quick_models):
    # More than 5 s: both models load.
    async with traced_pair(monkeypatch, quick_models) as (node, client, exporter):
        await calls(node, client, exporter)
        exporter.clear()
        await refusals_and_readers_who_leave(client, exporter)


async def calls(node, client, exporter):
    answer = await client.generate(SECRET, model=WRITER, max_new_tokens=8)
    spans = exporter.get_finished_spans()
    assert tree(spans) == GENERATION
    assert len({span.context.trace_id for span in spans}) == 1
    engine = next(span for span in spans if span.name == "engine")
    [pid] = [m.placements[0].engine.status.pid for m in node.manager.models if m.id == WRITER]
    assert engine.attributes["process.pid"] == pid
    assert engine.attributes["npu.device"] == "CPU"
    called = next(span for span in spans if span.parent is None)
    assert called.start_time < engine.start_time < engine.end_time < called.end_time
    # The node told the client how long the engine took until the node had heard of its end, which may be later.
    assert 0 < (engine.end_time - engine.start_time) / 1e6 <= answer.timing.generate + 1

    exporter.clear()
    pieces = [piece async for piece in client.stream(SECRET, model=WRITER, max_new_tokens=8)]
    assert "".join(pieces) == answer.text
    assert tree(exporter.get_finished_spans()) == GENERATION

    exporter.clear()
    await client.embed_many([SECRET, "another"], model=EMBEDDER)
    expected = f"embeddings {EMBEDDER} at the node"
    assert tree(exporter.get_finished_spans()) == {
        f"embeddings {EMBEDDER}": None,
        "POST /embeddings": f"embeddings {EMBEDDER}",
        expected: "POST /embeddings",
        **dict.fromkeys(("tokenize", "route", "queue", "engine"), expected),
    }

    exporter.clear()
    await client.embed_many([SECRET, "another"], model=EMBEDDER)
    assert "engine" not in tree(exporter.get_finished_spans()), "the cache had it"


async def refusals_and_readers_who_leave(client, exporter):
    with pytest.raises(RequestRejected):
        await client.embed(SECRET * 1000, model=EMBEDDER)
    refused = {span.name: span for span in exporter.get_finished_spans()}
    assert refused["embeddings"].attributes["error.type"] == "context_length_exceeded"
    assert refused["POST /embeddings"].attributes["http.response.status_code"] == 400
    assert refused["POST /embeddings"].status.is_ok or not refused["POST /embeddings"].status.description

    exporter.clear()
    async with client.stream(SECRET, model=WRITER, max_new_tokens=2000) as stream:
        await anext(stream)
    deadline = time.monotonic() + 30
    while "POST /inference" not in (left := {span.name: span for span in exporter.get_finished_spans()}):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    abandoned = [span for span in exporter.get_finished_spans() if span.attributes.get("npu.abandoned")]
    assert [span.name for span in abandoned] == [f"chat {WRITER}"]
    assert left["decode"].end_time <= left["engine"].end_time
    assert SECRET not in "".join(span.to_json() for span in exporter.get_finished_spans())


async def test_two_processes_send_one_trace_to_a_collector(quick_models):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="NOT RUN: install '.[tracing]'")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from tests.support.otlp import Collector

    async with Collector().running() as collector:
        environment = {
            "NPU_NODE_TRACING": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "NPU_NODE_API_KEYS": "key-that-nobody-may-see",
        }
        provider = TracerProvider(resource=Resource.create({"service.name": "shop"}), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=collector.url + "/v1/traces")))
        with start_node(ready=False, **environment, **quick_models) as node:
            await asyncio.to_thread(node.wait_for, lambda body: body["status"] == "ready")
            pids = await asyncio.to_thread(node.engine_pids)
            plain = NPUClient([node.url], api_key="key-that-nobody-may-see")
            async with instrument(
                plain, metrics=Metrics(CollectorRegistry()), tracer=provider.get_tracer("shop")
            ) as client:
                await client.generate(SECRET, model=WRITER, max_new_tokens=8)
            # The node sends what it has when it ends; the client's provider when it is told.
            assert await asyncio.to_thread(node.terminate) == 0
        await asyncio.to_thread(provider.shutdown)
    spans = {(span.service, span.name): span for span in collector.spans}
    assert len({span.trace_id for span in collector.spans}) == 1
    call, request = spans["shop", f"chat {WRITER}"], spans["npu-node", "POST /inference"]
    inference, engine = spans["npu-node", f"chat {WRITER}"], spans["npu-node", "engine"]
    assert not call.parent_id
    assert request.parent_id == call.span_id
    assert inference.parent_id == request.span_id
    assert engine.parent_id == inference.span_id
    assert spans["npu-node", "decode"].parent_id == engine.span_id
    assert engine.attributes["process.pid"] == pids[WRITER]
    assert call.start < request.start < engine.start < engine.end < call.end
    everything = b"".join(collector.bodies)
    assert SECRET.encode() not in everything
    assert b"key-that-nobody-may-see" not in everything
