"""A collector: takes spans by OTLP over HTTP and keeps them."""

import gzip
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """A span as it came. Ids are bytes, times nanoseconds; `service` is the sender's name."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    start: int
    end: int
    attributes: dict
    service: str


class Collector:
    """`url` is for OTEL_EXPORTER_OTLP_ENDPOINT; `bodies` are the messages as they came."""

    def __init__(self):
        self.spans = []
        self.bodies = []
        self.url = ""

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.add_routes([web.post("/v1/traces", self._take)])
        server = TestServer(app, host="127.0.0.1")
        await server.start_server()
        self.url = str(server.make_url("")).rstrip("/")
        try:
            yield self
        finally:
            await server.close()

    async def _take(self, request):
        body = await request.read()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(resource.resource)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_received(span, service) for span in scope.spans]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )


def _received(span, service):
    return Received(
        span.name,
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span),
        service,
    )


def _attributes(holder):
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in holder.attributes}
