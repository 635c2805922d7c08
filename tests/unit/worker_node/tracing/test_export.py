"""Sending spans: what is told when OpenTelemetry is missing, and that a dead collector holds up nothing."""

import socket
import sys
import threading
import time

import pytest

from worker_node.core.errors import ConfigurationError
from worker_node.observability.tracing import open_tracing

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "worker_node.observability.spans", raising=False)
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    with pytest.raises(ConfigurationError, match=r"pip install 'npu-node\[tracing\]'"):
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
