"""GET /metrics, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker_node import __version__
from worker_node.api.engine_metrics import EngineMetrics
from worker_node.api.health import STATUSES, device_list, node_status
from worker_node.api.keys import NODE
from worker_node.node import Node


def routes() -> list[web.RouteDef]:
    """The route of this file."""
    return [web.get("/metrics", _metrics)]


async def _metrics(request: web.Request) -> web.Response:
    text = generate_latest(request.app[NODE].telemetry.registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


class NodeCollector(Collector):
    """Reads engines and counters when they are asked for, instead of keeping a second copy of their state."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> Iterable[Metric]:
        """Nothing: the metrics are known only when they are read."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the state of the node, of every engine, and of the NPU, now."""
        yield from self._states()
        yield from EngineMetrics(self._node.manager).families()
        yield from self._npu()

    def _states(self) -> Iterable[Metric]:
        node = self._node
        info = GaugeMetricFamily("npu_node_info", "The node's version; always 1", labels=("version", "openvino"))
        info.add_metric((__version__, node.probe.openvino or ""), 1)
        yield info
        status = GaugeMetricFamily("npu_node_status", "1 for the status that /health tells", labels=("status",))
        now = node_status(node)
        for name in STATUSES:
            status.add_metric((name,), float(name == now))
        yield status
        in_flight = GaugeMetricFamily("npu_node_requests_in_flight", "Inference requests under way")
        in_flight.add_metric((), node.state.in_flight)
        yield in_flight

    def _npu(self) -> Iterable[Metric]:
        node = self._node
        emulated = GaugeMetricFamily("npu_node_npu_emulated", "1 if what is called the NPU here runs on the CPU")
        emulated.add_metric((), float(node.npu.emulated))
        yield emulated
        device = GaugeMetricFamily(
            "npu_node_device_available",
            "1 for a device that OpenVINO finds",
            labels=("device", "name", "driver", "emulated"),
        )
        for found in device_list(node):
            name, driver = found["full_name"] or "", found["driver"] or ""
            device.add_metric((found["name"], name, driver, str(found["emulated"]).lower()), float(found["available"]))
        yield device
        counters = node.npu.read()
        # A label of the sample itself, so that no graph of it can lose it.
        label, value = ("emulated",), (str(node.npu.emulated).lower(),)
        if counters.busy_time_us.value is not None:
            text = "NPU busy time by all of its users"
            busy = CounterMetricFamily("npu_node_npu_device_busy_seconds", text, labels=label)
            busy.add_metric(value, counters.busy_time_us.value / 1e6)
            yield busy
        if counters.memory_bytes.value is not None:
            memory = GaugeMetricFamily("npu_node_npu_memory_bytes", "NPU memory in use", labels=label)
            memory.add_metric(value, counters.memory_bytes.value)
            yield memory
        if counters.frequency_mhz.value is not None:
            frequency = GaugeMetricFamily("npu_node_npu_frequency_hertz", "Clock of the NPU now", labels=label)
            frequency.add_metric(value, counters.frequency_mhz.value * 1e6)
            yield frequency
