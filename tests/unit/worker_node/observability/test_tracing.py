"""The spans of a request's stages: their order, parents, ends, what is not in them, and how they are sent."""

import socket
import sys
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from tests.unit.worker_node.observability.recorded_spans import Recorded
from worker_node.core.errors import ConfigurationError, EngineUnavailable
from worker_node.core.types import Busy, Device, RequestContext, Route, Usage
from worker_node.observability.tracing import open_tracing, set_response_status
from worker_node.tasks.generate.messages import Sampling
from worker_node.tasks.generate.request import GenerationRequest, Message
from worker_node.tasks.generate.service import trace_generation

SECRET = "an unlikely secret"
CONTEXT = RequestContext("req_1", arrived=0.0, deadline=1e9)
ASKED = GenerationRequest(CONTEXT, (Message("user", SECRET),), Sampling(max_new_tokens=9, stop=(SECRET,)), model=SECRET)
ROUTE = Route("m", Device.NPU, "preferred", 7, emulated=True)
ENGINE = SimpleNamespace(status=SimpleNamespace(pid=4321))
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def recorded():
    return Recorded()


def test_a_generation_is_one_trace_with_its_caller(recorded):
    began = time.monotonic()
    with (
        recorded.tracing.request("POST", "/inference", {"traceparent": PARENT}, "req_1", began) as served,
        trace_generation(recorded.tracing, ASKED) as operation,
    ):
        operation.begin("route")
        operation.routed(ROUTE)
        operation.submitted(ENGINE)
        operation.begin("prefill", time.monotonic())
        operation.begin("decode", time.monotonic())
        operation.answered(Usage(7, 5), finish_reason="stop", busy=Busy(12), ended=time.monotonic())
        set_response_status(served, 200)
    spans = recorded.spans
    server = spans["POST /inference"]
    assert f"{server.context.trace_id:032x}-{server.parent.span_id:016x}" == PARENT[3:-3]
    order = [spans[name] for name in ("tokenize", "route", "queue", "prefill", "decode")]
    assert all(before.end_time <= after.start_time for before, after in pairwise(order))
    parents = {span.context.span_id: span for span in spans.values()}
    for span in spans.values():
        parent = parents.get(span.parent.span_id, span)
        assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time
    assert dict(spans["engine"].attributes) == {
        "gen_ai.response.model": "m",
        "npu.device": "NPU",
        "npu.emulated": True,
        "process.pid": 4321,
    }
    told = spans["chat m"].attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert (told["gen_ai.request.model"], told["gen_ai.response.model"]) == ("m", "m")
    assert told["gen_ai.request.max_tokens"] == 9
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (7, 5)
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["npu.busy_time_us"] == 12
    assert "npu.busy_exclusive" not in told, "which is not known"
    assert told["npu.route_reason"] == "preferred"
    assert server.attributes["http.response.status_code"] == 200


def test_a_failure_ends_the_open_stages_and_names_only_its_code(recorded):
    with pytest.raises(EngineUnavailable), trace_generation(recorded.tracing, ASKED) as operation:
        operation.begin("route")
        operation.routed(ROUTE)
        operation.submitted(ENGINE)
        operation.begin("prefill", time.monotonic())
        raise EngineUnavailable(SECRET)
    spans = recorded.spans
    assert recorded.tree()["prefill"] == "engine"
    assert "decode" not in spans
    assert spans["chat m"].attributes["error.type"] == "engine_unavailable"
    assert not spans["chat m"].status.is_ok
    assert not spans["chat m"].events


def test_a_caller_who_leaves_is_no_error(recorded):
    with trace_generation(recorded.tracing, ASKED) as operation:
        operation.begin("route")
        operation.routed(ROUTE)
        operation.submitted(ENGINE)
    span = recorded.spans["chat m"]
    assert span.attributes["npu.abandoned"]
    assert "error.type" not in span.attributes
    assert recorded.tree()["queue"] == "chat m"


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[tracing\]'"):
        open_tracing(enabled=True)


async def test_a_collector_that_never_answers_does_not_hold_up_the_end(monkeypatch):
    pytest.importorskip(EXPORTER, reason="NOT RUN: install '.[tracing]'")
    asked, answer = threading.Event(), threading.Event()

    def silent(listening):
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            asked.set()
            answer.wait()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        collector = threading.Thread(target=silent, args=(listening,))
        collector.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100000")
        tracing = open_tracing(enabled=True)
        with tracing.request("POST", "/inference", {}, "req_1", time.monotonic()):
            pass
        await tracing.close()
        assert asked.is_set(), "the span was sent"
        assert collector.is_alive(), "and nobody waited for the answer"
        answer.set()
        collector.join()
