"""GET /metrics, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker_node.api.keys import NODE, Node
from worker_node.engines.base import EngineState


def routes() -> list[web.RouteDef]:
    """The route of this file."""
    return [web.get("/metrics", _metrics)]


async def _metrics(request: web.Request) -> web.Response:
    text = generate_latest(request.app[NODE].registry.telemetry.registry)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


class NodeCollector(Collector):
    """Reads engines and counters when they are asked for, instead of keeping a second copy of their state."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first reading."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the state of every engine, and of the NPU, now."""
        yield from self._engines()
        emulated = GaugeMetricFamily("npu_node_npu_emulated", "1 if what is called the NPU here runs on the CPU")
        emulated.add_metric((), float(self._node.npu.emulated))
        yield emulated
        counters = self._node.npu.read()
        if counters.busy_time_us.value is not None:
            busy = CounterMetricFamily("npu_node_npu_device_busy_seconds", "NPU busy time by all of its users")
            busy.add_metric((), counters.busy_time_us.value / 1e6)
            yield busy
        if counters.memory_bytes.value is not None:
            memory = GaugeMetricFamily("npu_node_npu_memory_bytes", "NPU memory in use")
            memory.add_metric((), counters.memory_bytes.value)
            yield memory

    def _engines(self) -> Iterable[Metric]:
        labels = ("model", "device")
        ready = GaugeMetricFamily("npu_node_engine_ready", "1 if the engine serves", labels=labels)
        running = GaugeMetricFamily(
            "npu_node_num_requests_running", "Requests (texts, for embeddings) that the engine runs", labels=labels
        )
        waiting = GaugeMetricFamily(
            "npu_node_num_requests_waiting", "Requests or texts that wait in the engine", labels=labels
        )
        restarts = CounterMetricFamily("npu_node_engine_restarts", "Engine processes that ended", labels=labels)
        load = GaugeMetricFamily("npu_node_model_load_seconds", "The last load and compile", labels=labels)
        runs = CounterMetricFamily("npu_node_engine_runs", "Batches run, or steps of a generation", labels=labels)
        rows = CounterMetricFamily("npu_node_engine_rows", "Texts or sequences in them", labels=labels)
        usage = GaugeMetricFamily("npu_node_kv_cache_usage_ratio", "Share of the KV cache in use", labels=labels)
        for model in self._node.registry.models:
            for placement in model.placements:
                key = (model.id, placement.device.value)
                status = placement.engine.status
                ready.add_metric(key, float(status.state is EngineState.READY))
                running.add_metric(key, status.stats.running)
                waiting.add_metric(key, status.stats.waiting)
                runs.add_metric(key, status.stats.runs)
                rows.add_metric(key, status.stats.rows)
                if status.stats.kv_cache_usage is not None:
                    usage.add_metric(key, status.stats.kv_cache_usage)
                restarts.add_metric(key, status.restarts)
                if status.load_seconds is not None:
                    load.add_metric(key, status.load_seconds)
        return ready, running, waiting, runs, rows, usage, restarts, load
