"""What the gateway counts."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backend_client.client import InferenceClient


class Metrics:
    """The gateway's own counters, and what the client knows of its nodes."""

    def __init__(self, client: InferenceClient) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "npu_gateway_requests",
            "Requests by dialect, team and status",
            ("dialect", "team", "status"),
            registry=self.registry,
        )
        self.tokens = Counter(
            "npu_gateway_tokens", "Tokens that replies say they used", ("team", "kind"), registry=self.registry
        )
        self.answers = Counter(
            "npu_gateway_answers", "Answers by who gave them: node or cloud", ("source",), registry=self.registry
        )
        self.attempts = Counter("npu_gateway_attempts", "Tries on nodes and the cloud", registry=self.registry)
        self.store_failures = Counter(
            "npu_gateway_store_failures", "Times that the store of limits and spend caps failed", registry=self.registry
        )
        self.refused_keys = Counter("npu_gateway_refused_keys", "Requests without a valid key", registry=self.registry)
        self.registered = Gauge(
            "npu_gateway_registered_nodes", "Nodes that announced themselves lately", registry=self.registry
        )
        self.spend_ratio = Gauge(
            "npu_gateway_spend_ratio",
            "Share of a team's spend cap that this month's cloud calls used or reserved",
            ("team",),
            registry=self.registry,
        )
        self.in_flight = Gauge("npu_gateway_in_flight", "Requests under way", registry=self.registry)
        self.registry.register(_Nodes(client))


class _Nodes(Collector):
    def __init__(self, client: InferenceClient) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        """Read when the metrics are asked for."""
        nodes = GaugeMetricFamily("npu_gateway_node_usable", "Whether requests go to a node", labels=("node",))
        models = GaugeMetricFamily("npu_gateway_model_nodes", "Usable nodes that serve a model", labels=("model",))
        count: dict[str, int] = {}
        for node in self._client.npu.status():
            nodes.add_metric([node.url], float(node.usable))
            for model in node.models:
                count[model.id] = count.get(model.id, 0) + (node.usable and model.state in {"ready", "unloaded"})
        for name, found in count.items():
            models.add_metric([name], found)
        yield nodes
        yield models
