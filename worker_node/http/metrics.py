"""The metrics of each placement: the state of its engine, its queue, and what its process holds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partialmethod
from typing import get_args

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker_node import __version__
from worker_node.core.types import Device, Priority
from worker_node.devices.memory import npu_memory, process_use
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.http.context import NODE
from worker_node.http.health import STATUSES, device_list, node_status
from worker_node.http.routes import TEXT, ApiOperation
from worker_node.manager.manager import ModelManager
from worker_node.manager.placement import ExcludedPlacement, Placement
from worker_node.models.passports import State
from worker_node.node import Node
from worker_node.serving.demanded_faults import read_faults

# `GrowthLimits.replacement`; all are shown, so that the first of a kind is seen as an increase.
_RECYCLE_FORMS = ("idle", "forced")
_SHAPE_ORIGINS = ("compiled", "imported")
Family = GaugeMetricFamily | CounterMetricFamily


class Readings(dict[str, Family]):
    """What was read at one time, by the name of the metric; a value of None is left out."""

    def _add(self, kind: type[Family], name: str, text: str, value: float | None, /, **labels: str) -> None:
        if value is None:
            return
        if name not in self:
            self[name] = kind(name if ":" in name else f"npu_node_{name}", text, labels=tuple(labels))
        self[name].add_metric(tuple(labels.values()), float(value))

    gauge = partialmethod(_add, GaugeMetricFamily)
    counter = partialmethod(_add, CounterMetricFamily)


class _Collector(Collector):
    """Reads its metrics when they are asked for, instead of keeping a second copy of what they say."""

    def describe(self) -> Iterable[Metric]:
        return ()


class NodeCollector(_Collector):
    """The state of the node, of every engine, and of the NPU, now."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterable[Metric]:
        found = Readings()
        _read_node(found, self._node)
        _read_npu(found, self._node)
        read_models(found, self._node.manager)
        return found.values()


def _read_node(found: Readings, node: Node) -> None:
    version, openvino = __version__, node.probe.openvino or ""
    found.gauge("info", "The node's version; always 1", 1, version=version, openvino=openvino)
    now = node_status(node)
    for name in STATUSES:
        found.gauge("status", "1 for the status in /health", name == now, status=name)
    faults = len(read_faults(node.settings.faults))
    found.gauge("faults_on_demand", "Faults that the node was started with, for tests", faults)
    found.gauge("requests_in_flight", "Inference requests under way", node.state.running)


def _read_npu(found: Readings, node: Node) -> None:
    # A label of the samples themselves, so that no graph of them can lose it.
    emulated = str(node.npu.emulated).lower()
    found.gauge("npu_emulated", "1 if what is called the NPU here runs on the CPU", node.npu.emulated)

    for device in device_list(node):
        found.gauge(
            "device_available",
            "1 for a device that OpenVINO finds",
            device["available"],
            device=device["name"],
            name=device["full_name"] or "",
            driver=device["driver"] or "",
            emulated=str(device["emulated"]).lower(),
        )

    counters = node.npu.read()
    busy_us, mhz = counters.busy_time_us.value, counters.frequency_mhz.value
    busy_s = None if busy_us is None else busy_us / 1e6
    found.counter("npu_device_busy_seconds", "NPU busy time by all of its users", busy_s, emulated=emulated)
    joules = None if counters.energy_uj.value is None else counters.energy_uj.value / 1e6
    found.counter("npu_device_joules", "Energy used by the NPU, for all of its users", joules, emulated=emulated)
    found.gauge("npu_memory_bytes", "NPU memory in use", counters.memory_bytes.value, emulated=emulated)
    hertz = None if mhz is None else mhz * 1e6
    found.gauge("npu_frequency_hertz", "Clock of the NPU now", hertz, emulated=emulated)


def read_models(found: Readings, manager: ModelManager) -> None:
    """Every placement of the models, and the placements that they may not have."""
    running = waiting = 0
    for model in manager.models:
        for placement in model.placements:
            by = {"model": model.id, "device": placement.device.value}
            _read_engine(found, placement.status, by)
            _read_process(found, placement, by)
            _read_admission(found, placement, by)
            stats = placement.engine.status.stats
            running, waiting = running + stats.running, waiting + stats.waiting
        _read_certified(found, model.id, (*model.placements, *model.excluded))
        loaded = [place for place in model.placements if place.state is EngineState.READY]
        found.gauge("loaded_models", "Devices on which the model is loaded", len(loaded), model=model.id)

    for failed in manager.failed:
        _read_certified(found, failed.name, failed.excluded)

    # vLLM's names, which the endpoint picker of Kubernetes' Gateway API reads: one sample each, for all models, since
    # it takes one of several.
    for state, count in (("running", running), ("waiting", waiting)):
        text = f"Requests (texts, for embeddings) of all models that are {state}, under vLLM's name"
        found.gauge(f"vllm:num_requests_{state}", text, count)


def _read_engine(found: Readings, status: EngineStatus, by: dict[str, str]) -> None:
    stats = status.stats
    found.gauge("engine_ready", "1 if the engine serves", status.state is EngineState.READY, **by)
    for state in EngineState:
        text = "1 for the state that the engine is in"
        found.gauge("engine_state", text, status.state is state, **by, state=state.value)
    found.gauge("engine_in_flight", "Jobs that the engine process holds, running or waiting", status.in_flight, **by)
    found.gauge("num_requests_running", "Requests (texts, for embeddings) that the engine runs", stats.running, **by)
    found.gauge("num_requests_waiting", "Requests or texts that wait in the engine", stats.waiting, **by)
    found.gauge("kv_cache_usage_ratio", "Share of the KV cache in use", stats.kv_cache_usage, **by)
    found.gauge("model_load_seconds", "The last load and compile", status.loaded and status.loaded.seconds, **by)
    found.counter("engine_runs", "Batches run, or steps of a generation", stats.runs, **by)
    found.counter("engine_rows", "Texts or sequences in them", stats.rows, **by)
    text = "Prompt tokens that were looked up in the prefix cache"
    found.counter("prefix_cache_asked_tokens", text, stats.prefix_asked_tokens, **by)
    text = "Of these, tokens of whole blocks that an earlier prompt began with, too; the cache may have dropped some"
    found.counter("prefix_cache_hit_tokens", text, stats.prefix_hit_tokens, **by)
    found.counter("engine_restarts", "Engine processes that ended", status.restarts, **by)
    found.counter("canary_failures", "Times that the engine answered a known question wrong", status.wrong, **by)
    text = "When the canary passed last, since the epoch"
    found.gauge("canary_passed_timestamp_seconds", text, status.proven_at, **by)


def _read_process(found: Readings, placement: Placement, by: dict[str, str]) -> None:
    status = placement.engine.status
    for form in _RECYCLE_FORMS:
        text = "Engine processes replaced because their memory had grown; failed: the successor did not become ready"
        found.counter("engine_recycles", text, status.recycles.get(form, 0), **by, form=form)
    if placement.device is Device.NPU:
        text = "Static shapes of a model that engine processes imported from blobs, or compiled (or cached)"
        for origin in _SHAPE_ORIGINS:
            found.counter("loaded_shapes", text, status.shapes.get(origin, 0), **by, origin=origin)
        held = None if status.pid is None else npu_memory(status.pid)
        found.gauge("engine_npu_memory_bytes", "NPU memory that the engine process holds", held, **by)
    if status.pid is not None and (use := process_use(status.pid)) is not None:
        found.gauge("engine_resident_memory_bytes", "Resident memory of the engine process", use.resident, **by)
        found.gauge("engine_open_fds", "Open file descriptors of the engine process", use.files, **by)


def _read_admission(found: Readings, placement: Placement, by: dict[str, str]) -> None:
    admission = placement.admission
    text = "Requests or texts admitted and not finished"
    found.gauge("admission_outstanding", text, admission.outstanding, **by)
    if seconds := admission.decode_rate.seconds(1):
        found.gauge("tokens_per_second", "Tokens a second of the latest generations", 1 / seconds, **by)
    text = "Requests or texts that may be admitted at once; more are refused"
    found.gauge("admission_limit", text, admission.limits.max_outstanding, **by)
    for priority in Priority:
        interactive = priority is Priority.INTERACTIVE
        text, tokens = "Tokens expected to be computed yet", admission.expected_tokens(interactive=interactive)
        found.gauge("admission_outstanding_tokens", text, tokens, **by, priority=priority.value)
        text = "Estimated wait of a request that comes now; none before anything was measured"
        wait = admission.expected_wait(interactive=interactive)
        found.gauge("admission_expected_wait_seconds", text, wait, **by, priority=priority.value)


def _read_certified(found: Readings, model: str, places: Iterable[Placement | ExcludedPlacement]) -> None:
    text = "1 for what the passports say of the model on the device, used or excluded"
    for place in places:
        for state in get_args(State):
            is_it = place.standing.state == state
            found.gauge("certified", text, is_it, model=model, device=place.device.value, state=state)


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


class NpuProxyCollector(_Collector):
    """Metrics of a registry under npu-proxy's names; samples that differ in labels which it lacks are added up."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
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
