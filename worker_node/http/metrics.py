"""The metrics of each placement: the state of its engine, its queue, and what its process holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker_node import __version__
from worker_node.core.types import Device, Priority
from worker_node.devices.memory import process_use
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.http.health import STATUSES, device_list, node_status
from worker_node.http.request_state import NODE
from worker_node.http.task import TEXT, ApiOperation
from worker_node.manager.manager import ModelManager
from worker_node.manager.placement import ExcludedPlacement, Placement
from worker_node.models.passports import State
from worker_node.node import Node

_BY = ("model", "device")
# `GrowthLimits.replacement`; all are shown, so that the first of a kind is seen as an increase.
RECYCLE_FORMS = ("idle", "forced")
SHAPE_ORIGINS = ("compiled", "imported")


class EngineMetrics:
    """One reading of every placement of a node. `families` has the metrics once all were read."""

    def __init__(self, manager: ModelManager) -> None:
        self._gauges: dict[str, GaugeMetricFamily] = {}
        self._counters: dict[str, CounterMetricFamily] = {}
        # vLLM's names, which the endpoint picker of Kubernetes' Gateway API reads: one sample each, for all models,
        # since it takes one of several.
        self._load = dict.fromkeys(("running", "waiting"), 0)
        for model in manager.models:
            for placement in model.placements:
                self._read(model.id, placement)
            for excluded in model.excluded:
                self._certified(model.id, excluded)
            loaded = [place for place in model.placements if place.state is EngineState.READY]
            self._gauge(
                "loaded_models", "Devices on which the model is loaded", (model.id,), len(loaded), by=("model",)
            )

        for failed in manager.failed:
            for excluded in failed.excluded:
                self._certified(failed.name, excluded)

    def families(self) -> Iterable[Metric]:
        """All metrics that have a sample."""
        yield from self._gauges.values()
        yield from self._counters.values()
        for state, count in self._load.items():
            text = f"Requests (texts, for embeddings) of all models that are {state}, under vLLM's name"
            yield GaugeMetricFamily(f"vllm:num_requests_{state}", text, count)

    def _read(self, model: str, placement: Placement) -> None:
        key = (model, placement.device.value)
        status = placement.engine.status
        self._engine(key, status)
        self._certified(model, placement)
        self._admission(key, placement)
        self._processes(key, placement.device, status)

    def _engine(self, key: tuple[str, str], status: EngineStatus) -> None:
        stats = status.stats
        self._gauge("engine_ready", "1 if the engine serves", key, status.state is EngineState.READY)
        for state in EngineState:
            is_it = status.state is state
            self._gauge("engine_state", "1 for the state that the engine is in", (*key, state.value), is_it, "state")
        self._gauge("engine_in_flight", "Jobs that the engine process holds, running or waiting", key, status.in_flight)
        self._gauge("num_requests_running", "Requests (texts, for embeddings) that the engine runs", key, stats.running)
        self._gauge("num_requests_waiting", "Requests or texts that wait in the engine", key, stats.waiting)
        self._load["running"] += stats.running
        self._load["waiting"] += stats.waiting
        self._gauge("kv_cache_usage_ratio", "Share of the KV cache in use", key, stats.kv_cache_usage)
        self._gauge("model_load_seconds", "The last load and compile", key, status.load_seconds)
        self._counter("engine_runs", "Batches run, or steps of a generation", key, stats.runs)
        self._counter("engine_rows", "Texts or sequences in them", key, stats.rows)
        text = "Prompt tokens that were looked up in the prefix cache"
        self._counter("prefix_cache_asked_tokens", text, key, stats.prefix_asked_tokens)
        text = (
            "Of these, tokens of whole blocks that an earlier prompt began with, too; the cache may have dropped some"
        )
        self._counter("prefix_cache_hit_tokens", text, key, stats.prefix_hit_tokens)
        self._counter("engine_restarts", "Engine processes that ended", key, status.restarts)
        self._counter("canary_failures", "Times that the engine answered a known question wrong", key, status.wrong)
        if status.proof is not None:
            text = "When the canary passed last, since the epoch"
            self._gauge("canary_passed_timestamp_seconds", text, key, status.proof.passed_at)

    def _certified(self, model: str, placement: Placement | ExcludedPlacement) -> None:
        text = "1 for what the passports say of the model on the device, used or excluded"
        for state in get_args(State):
            key = (model, placement.device.value, state)
            self._gauge("certified", text, key, placement.standing.state == state, "state")

    def _admission(self, key: tuple[str, str], placement: Placement) -> None:
        admission = placement.admission
        self._gauge("admission_outstanding", "Requests or texts admitted and not finished", key, admission.outstanding)
        if seconds := admission.decode_rate.seconds(1):
            self._gauge("tokens_per_second", "Tokens a second of the latest generations", key, 1 / seconds)
        text = "Requests or texts that may be admitted at once; more are refused"
        self._gauge("admission_limit", text, key, admission.limits.max_outstanding)
        for priority in Priority:
            interactive = priority is Priority.INTERACTIVE
            by = (*key, priority.value)
            tokens = admission.expected_tokens(interactive=interactive)
            self._gauge("admission_outstanding_tokens", "Tokens expected to be computed yet", by, tokens, "priority")
            text = "Estimated wait of a request that comes now; none before anything was measured"
            wait = admission.expected_wait(interactive=interactive)
            self._gauge("admission_expected_wait_seconds", text, by, wait, "priority")

    def _processes(self, key: tuple[str, str], device: Device, status: EngineStatus) -> None:
        for form in RECYCLE_FORMS:
            text = (
                "Engine processes replaced because their memory had grown; failed: the successor did not become ready"
            )
            self._counter("engine_recycles", text, (*key, form), status.recycles.get(form, 0), "form")
        if device is Device.NPU:
            text = "Static shapes of a model that engine processes imported from blobs, or compiled (or cached)"
            for origin in SHAPE_ORIGINS:
                self._counter("loaded_shapes", text, (*key, origin), status.shapes.get(origin, 0), "origin")
        if status.pid is not None and (use := process_use(status.pid)) is not None:
            self._gauge("engine_resident_memory_bytes", "Resident memory of the engine process", key, use.resident)
            self._gauge("engine_open_fds", "Open file descriptors of the engine process", key, use.files)

    def _gauge(
        self,
        name: str,
        text: str,
        key: tuple[str, ...],
        value: float | None,
        *more: str,
        by: tuple[str, ...] = _BY,
    ) -> None:
        """Add a sample; `more` are the labels whose values `key` has after those of `by`."""
        if value is not None:
            labels = (*by, *more)
            family = self._gauges.setdefault(name, GaugeMetricFamily(f"npu_node_{name}", text, labels=labels))
            family.add_metric(key, float(value))

    def _counter(self, name: str, text: str, key: tuple[str, ...], value: float, *more: str) -> None:
        """See `_gauge`."""
        labels = (*_BY, *more)
        family = self._counters.setdefault(name, CounterMetricFamily(f"npu_node_{name}", text, labels=labels))
        family.add_metric(key, value)


# npu-proxy's names, and the labels that it has of ours.
_NPU_PROXY = {
    "npu_node_http_requests": ("npu_proxy_requests", {"route": "endpoint", "status": "status"}),
    "npu_node_request_inference_time_seconds": (
        "npu_proxy_inference_duration_seconds",
        {"model": "model", "device": "device"},
    ),
    "npu_node_time_to_first_token_seconds": ("npu_proxy_time_to_first_token_seconds", {"model": "model"}),
    "npu_node_inter_token_latency_seconds": ("npu_proxy_inter_token_latency_seconds", {"model": "model"}),
    "npu_node_tokens_per_second": ("npu_proxy_tokens_per_second", {"model": "model"}),
    "npu_node_loaded_models": ("npu_proxy_loaded_models", {"model": "model"}),
    "npu_node_generation_tokens": ("npu_proxy_tokens_generated", {"model": "model"}),
}


class NpuProxyCollector(Collector):
    """Metrics of a registry under npu-proxy's names; samples that differ in labels which it lacks are added up."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: they are known only when they are read."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics that npu-proxy had."""
        for family in self._registry.collect():
            if family.name not in _NPU_PROXY:
                continue
            name, labels = _NPU_PROXY[family.name]
            sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
            for sample in family.samples:
                kept = {labels.get(label, label): of for label, of in sample.labels.items() if label in {*labels, "le"}}
                key = (name + sample.name.removeprefix(family.name), tuple(kept.items()))
                sums[key] = sums.get(key, 0.0) + sample.value
            renamed = Metric(name, family.documentation, family.type)
            for (sample_name, found), value in sums.items():
                renamed.add_sample(sample_name, dict(found), value)
            yield renamed


async def _metrics(request: web.Request) -> web.Response:
    node = request.app[NODE]
    text = generate_latest(node.telemetry.registry)
    if node.settings.npu_proxy_names:
        as_proxy = CollectorRegistry()
        as_proxy.register(NpuProxyCollector(node.telemetry.registry))
        text += generate_latest(as_proxy)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


OPERATIONS = (ApiOperation("get", "/metrics", _metrics, "Metrics for Prometheus", {TEXT: None}),)


class NodeCollector(Collector):
    """Reads engines and counters when they are asked for, instead of keeping a second copy of their state."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> Iterable[Metric]:
        """Return no metrics: they are known only when they are read."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the state of the node, of every engine, and of the NPU, now."""
        yield from self._states()
        yield from EngineMetrics(self._node.manager).families()
        yield from self._npu()

    def _states(self) -> Iterable[Metric]:
        node = self._node
        yield _gauge("info", "The node's version; always 1", 1, version=__version__, openvino=node.probe.openvino or "")
        status = GaugeMetricFamily("npu_node_status", "1 for the status in /health", labels=("status",))
        now = node_status(node)
        for name in STATUSES:
            status.add_metric((name,), float(name == now))
        yield status
        yield _gauge("requests_in_flight", "Inference requests under way", node.state.in_flight)

    def _npu(self) -> Iterable[Metric]:
        node = self._node
        yield _gauge("npu_emulated", "1 if what is called the NPU here runs on the CPU", node.npu.emulated)
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
        emulated = str(node.npu.emulated).lower()
        if counters.busy_time_us.value is not None:
            text = "NPU busy time by all of its users"
            busy = CounterMetricFamily("npu_node_npu_device_busy_seconds", text, labels=("emulated",))
            busy.add_metric((emulated,), counters.busy_time_us.value / 1e6)
            yield busy
        if counters.memory_bytes.value is not None:
            yield _gauge("npu_memory_bytes", "NPU memory in use", counters.memory_bytes.value, emulated=emulated)
        if counters.frequency_mhz.value is not None:
            hertz = counters.frequency_mhz.value * 1e6
            yield _gauge("npu_frequency_hertz", "Clock of the NPU now", hertz, emulated=emulated)


def _gauge(name: str, text: str, value: float, **labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"npu_node_{name}", text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), float(value))
    return family
