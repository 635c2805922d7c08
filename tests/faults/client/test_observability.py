"""Metrics and spans of calls that succeed, are retried, fall back, fail and break off."""

from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from prometheus_client import CollectorRegistry

from backend_client import (
    CloudClient,
    CloudSettings,
    InferenceClient,
    NPUClient,
    NPUUnavailableError,
    StreamInterrupted,
    sync,
)
from backend_client.gateway.app import make_app
from backend_client.gateway.settings import GatewaySettings
from backend_client.observability import Metrics, instrument
from backend_client.testing import cut
from tests.faults.scripted_node import (
    ANSWER,
    EMBEDDER,
    WRITER,
    ScriptedNode,
    answering,
    error_response,
    served_in_thread,
)


class Observed:
    """A registry and the spans of one test."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")

    def __call__(self, client):
        return instrument(client, metrics=self.metrics, tracer=self.tracer)

    def value(self, name, **labels):
        return self.registry.get_sample_value(name, labels)

    @property
    def spans(self):
        return self.exporter.get_finished_spans()


def server_of(span):
    return span.attributes["server.address"], span.attributes["server.port"]


def host_and_port(url):
    parts = urlsplit(url)
    return parts.hostname, parts.port


@pytest.fixture
def observed():
    return Observed()


async def test_each_operation_has_a_span_and_its_tokens(scripted, observed):
    async with observed(NPUClient([scripted.url])) as client:
        await client.embed("text")
        await client.generate("prompt", model=WRITER)
        stream = client.stream("prompt")
        assert [piece async for piece in stream] == ANSWER
        assert stream.result is not None
    assert [span.name for span in observed.spans] == ["embeddings", f"chat {WRITER}", "chat"]
    assert [span.kind for span in observed.spans] == [SpanKind.CLIENT] * 3
    assert {span.attributes["gen_ai.provider.name"] for span in observed.spans} == {"npu-node"}
    assert {server_of(span) for span in observed.spans} == {host_and_port(scripted.url)}
    assert "gen_ai.usage.output_tokens" not in observed.spans[0].attributes
    assert observed.spans[1].attributes["gen_ai.request.model"] == WRITER
    assert "gen_ai.request.stream" not in observed.spans[1].attributes
    attributes = observed.spans[2].attributes
    assert attributes["gen_ai.request.stream"]
    assert attributes["gen_ai.response.model"] == WRITER
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (1, 4)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    of_chat = {"operation": "chat", "source": "node", "model": WRITER}
    assert observed.value("gen_ai_client_token_usage_count", **of_chat, type="output") == 2
    assert observed.value("gen_ai_client_token_usage_sum", **of_chat, type="output") == 8
    assert observed.value("gen_ai_client_operation_duration_seconds_count", **of_chat, error="") == 2
    of_embeddings = {"operation": "embeddings", "source": "node", "model": EMBEDDER}
    assert observed.value("gen_ai_client_token_usage_sum", **of_embeddings, type="input") == 0
    assert observed.value("gen_ai_client_token_usage_count", **of_embeddings, type="output") is None


async def test_retries_and_failures_are_counted(scripted, observed):
    scripted.respond = answering(
        lambda: error_response(503, "engine_unavailable", retry_after_ms=1) if len(scripted.requests) < 2 else None
    )
    async with observed(NPUClient([scripted.url])) as client:
        await client.embed("text")
        assert len(scripted.requests) == 2
        assert len({request.headers["traceparent"] for request in scripted.requests}) == 1
        scripted.health_status = "draining"
        assert observed.value("npu_client_attempts_total", node=scripted.url, outcome="NodeNotServing") == 1
        assert observed.value("npu_client_attempts_total", node=scripted.url, outcome="ok") == 1
        with pytest.raises(NPUUnavailableError):
            await client.embed("text", require_device="NPU")
    assert observed.spans[1].attributes["error.type"] == "NPUUnavailableError"
    assert observed.spans[1].attributes["gen_ai.provider.name"] == "npu-node"
    assert not observed.spans[1].status.is_ok
    assert not observed.spans[1].events


async def test_the_state_of_nodes_breakers_and_budget_is_told(scripted, observed):
    async with observed(NPUClient([scripted.url, "http://127.0.0.1:1"])) as client:
        await client.health()
        assert observed.value("npu_client_node_usable", node=scripted.url) == 1
        assert observed.value("npu_client_node_usable", node="http://127.0.0.1:1") == 0
        assert observed.value("npu_client_breaker_state", node=scripted.url, state="closed") == 1
        assert observed.value("npu_client_breaker_state", node=scripted.url, state="open") == 0
        assert observed.value("npu_client_in_flight", node=scripted.url) == 0
        assert observed.value("npu_client_retry_budget") >= 2
        assert observed.value("npu_client_retries_refused_total") == 0

        scripted.respond = answering(lambda: error_response(500, "internal_error"))
        while observed.value("npu_client_retries_refused_total") == 0:
            with pytest.raises(NPUUnavailableError):
                await client.embed("text")
        assert observed.value("npu_client_retry_budget") < 1


def test_a_blocking_client_is_observed_within_the_callers_span(observed):
    with served_in_thread(ScriptedNode()) as url, sync.NPUClient([url]) as client:
        observed(client)
        with observed.tracer.start_as_current_span("the caller's"):
            client.embed("text")
        assert observed.value("npu_client_node_usable", node=url) == 1
    [embeddings, caller] = observed.spans
    assert embeddings.name == "embeddings"
    assert embeddings.parent.span_id == caller.context.span_id


async def test_what_the_cloud_cost_is_told(scripted, cloud, observed):
    prices = {"cloud-chat": {"input": 1, "output": 2}}
    settings = CloudSettings(base_url=cloud.url, api_key="sk", chat_model="cloud-chat", prices=prices, spend_cap=5)
    client = InferenceClient(NPUClient([scripted.url]), CloudClient(settings))
    async with observed(client):
        await client.generate("prompt")
        scripted.health_status = "draining"
        await client.npu.health()
        scripted.respond = answering(lambda: error_response(503, "draining"))
        await client.generate("prompt")
        assert observed.value("npu_client_served_calls_total", source="node") == 1
        assert observed.value("npu_client_served_calls_total", source="cloud") == 1
        assert observed.value("npu_client_cloud_cost_total") == pytest.approx((13 + 2 * 5) / 1e6)
        assert observed.value("npu_client_cloud_spend_cap") == 5
        assert observed.value("npu_client_breaker_state", node="cloud", state="closed") == 1
    assert all("traceparent" not in request.headers for request in cloud.requests)


async def test_a_stream_that_breaks_off_or_is_left_ends_its_span(scripted, observed):
    async with observed(NPUClient([scripted.url])) as client:
        async with client.stream("prompt") as stream:
            assert await anext(stream) == ANSWER[0]
        scripted.script(cut(1))
        with pytest.raises(StreamInterrupted):
            [_ async for _ in client.stream("prompt")]
        assert client.status()[0].in_flight == 0
    left, broken = observed.spans
    assert "error.type" not in left.attributes
    assert broken.attributes["error.type"] == "StreamInterrupted"
    assert {span.attributes["gen_ai.provider.name"] for span in (left, broken)} == {"npu-node"}
    assert server_of(broken) == host_and_port(scripted.url)
    of_streams = {"operation": "chat", "source": "", "model": "", "error": "cancelled"}
    assert observed.value("gen_ai_client_operation_duration_seconds_count", **of_streams) == 1


async def test_a_client_that_is_instrumented_twice_is_counted_once(scripted, observed, monkeypatch):
    """Also by the default registry, as a service does at start-up."""
    monkeypatch.setattr(Metrics.__new__, "__defaults__", (observed.registry,))
    async with observed(observed(NPUClient([scripted.url]))) as client:
        instrument(client, tracer=observed.tracer)
        await client.embed("text")
        labels = {"operation": "embeddings", "source": "node", "model": EMBEDDER, "error": ""}
        assert observed.value("gen_ai_client_operation_duration_seconds_count", **labels) == 1
        assert len(observed.spans) == 1
        elsewhere = CollectorRegistry()
        instrument(client, metrics=Metrics(elsewhere), tracer=observed.tracer)
        await client.embed("text")
        assert elsewhere.get_sample_value("gen_ai_client_operation_duration_seconds_count", labels) == 1
        assert observed.value("gen_ai_client_operation_duration_seconds_count", **labels) == 2


async def test_what_a_gateway_hands_on_is_observed_in_its_callers_trace(scripted, cloud, observed):
    behind = CloudClient(CloudSettings(base_url=cloud.url, api_key="k", chat_models={WRITER: "cloud-chat"}))
    client = observed(InferenceClient(NPUClient([scripted.url]), behind))
    chat = {"model": WRITER, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    chat["stream_options"] = {"include_usage": True}
    trace = "0123456789abcdef0123456789abcdef"
    server = TestServer(make_app(GatewaySettings.load(), client), host="127.0.0.1")
    async with server, aiohttp.ClientSession(server.make_url("/")) as http:
        await http.post("/embeddings", json={"texts": ["a", "b"]}, headers={"Traceparent": f"00-{trace}-{'1' * 16}-01"})
        async with http.post("/v1/chat/completions", json=chat) as reply:
            await reply.read()
        scripted.respond = answering(lambda: error_response(503, "draining"))
        async with http.post("/v1/chat/completions", json=chat) as reply:
            await reply.read()
            assert reply.headers["X-NPU-Gateway-Source"] == "cloud"
    first, second, third = observed.spans
    assert [span.name for span in observed.spans] == ["embeddings", f"chat {WRITER}", f"chat {WRITER}"]
    assert f"{first.context.trace_id:032x}" == trace
    assert scripted.requests[0].headers.getall("traceparent") == [f"00-{trace}-{first.context.span_id:016x}-01"]
    assert second.attributes["gen_ai.usage.output_tokens"] == len(ANSWER)
    assert (server_of(second), server_of(third)) == (host_and_port(scripted.url), host_and_port(cloud.url))
    assert observed.value("npu_client_attempts_total", node=scripted.url, outcome="ok") == 2
    labels = {"operation": "chat", "source": "cloud", "model": "cloud-chat", "error": ""}
    assert observed.value("gen_ai_client_operation_duration_seconds_count", **labels) == 1
