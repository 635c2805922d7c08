"""One trace from the client through the edge to the engine, on real models, sent to a collector by two processes."""

import asyncio
import gzip
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client import CollectorRegistry

from backend_client import NPUClient
from backend_client.observability import Metrics, instrument
from tests.support.nodes import start_node

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("store"), pytest.mark.timeout(240)]
WRITER = "smollm2-135m-instruct"
SECRET = "the butler with the candlestick"
KEY = "key-that-nobody-may-see"


@asynccontextmanager
async def collector(bodies):
    """Takes spans by OTLP over HTTP; yields the endpoint. `bodies` get the messages as they came."""

    async def take(request):
        body = await request.read()
        bodies.append(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.add_routes([web.post("/v1/traces", take)])
    async with TestServer(app, host="127.0.0.1") as server:
        yield str(server.make_url("")).rstrip("/")


def spans_of(bodies):
    resources = [found for body in bodies for found in ExportTraceServiceRequest.FromString(body).resource_spans]
    return {
        (attributes(found.resource)["service.name"], span.name): span
        for found in resources
        for scope in found.scope_spans
        for span in scope.spans
    }


def attributes(holder):
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in holder.attributes}


async def test_two_processes_send_one_trace_to_a_collector(quick_models):
    # More than 5 s: both models load.
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="NOT RUN: install '.[tracing]'")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    bodies = []
    async with collector(bodies) as url:
        environment = {"NPU_NODE_TRACING": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": url, "NPU_NODE_API_KEYS": KEY}
        provider = TracerProvider(resource=Resource.create({"service.name": "shop"}), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url + "/v1/traces")))
        metrics, tracer = Metrics(CollectorRegistry()), provider.get_tracer("shop")
        with start_node(ready=False, **environment, **quick_models) as node:
            await asyncio.to_thread(node.wait_for, lambda body: body["status"] == "ready")
            pids = await asyncio.to_thread(node.engine_pids)
            async with instrument(NPUClient([node.url], api_key=KEY), metrics=metrics, tracer=tracer) as client:
                answer = await client.generate(SECRET, model=WRITER, max_new_tokens=8)
            # The node sends what it has when it ends; the client's provider when it is shut down.
            assert await asyncio.to_thread(node.terminate) == 0
        await asyncio.to_thread(provider.shutdown)
    spans = spans_of(bodies)
    assert len({span.trace_id for span in spans.values()}) == 1
    call, request = spans["shop", f"chat {WRITER}"], spans["npu-node", "POST /inference"]
    inference, engine = spans["npu-node", f"chat {WRITER}"], spans["npu-node", "engine"]
    assert not call.parent_span_id
    assert request.parent_span_id == call.span_id
    assert inference.parent_span_id == request.span_id
    for stage in ("tokenize", "route", "queue", "engine"):
        assert spans["npu-node", stage].parent_span_id == inference.span_id
    for stage in ("prefill", "decode"):
        assert spans["npu-node", stage].parent_span_id == engine.span_id
    assert attributes(engine)["process.pid"] == pids[WRITER]
    assert attributes(engine)["npu.device"] == "CPU"
    times = [call, request, engine]
    assert sorted(times, key=lambda span: span.start_time_unix_nano) == times
    assert engine.end_time_unix_nano < call.end_time_unix_nano
    # The node told the client how long the engine took until the node had heard of its end, which may be later.
    assert (engine.end_time_unix_nano - engine.start_time_unix_nano) / 1e6 <= answer.timing.generate + 1
    everything = b"".join(bodies)
    assert SECRET.encode() not in everything
    assert KEY.encode() not in everything
