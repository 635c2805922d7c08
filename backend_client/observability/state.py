"""A client's state as Prometheus metrics: its nodes, breakers, retry budget, and the cost of the cloud.

Read on collection, so that no value is kept twice. The clients of one registry are reported together: counts and costs
are summed, and a node is usable only if all of them would send requests there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from weakref import WeakSet

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backend_client.calls import BaseClient
from backend_client.client import InferenceClient, NPUClient
from backend_client.cloud.ledger import Ledger
from backend_client.fleet.node import BreakerState


class StateCollector(Collector):
    """Reads the clients that it watches; one that was garbage-collected is not watched any more."""

    def __init__(self) -> None:
        self._clients: WeakSet[BaseClient] = WeakSet()

    def watch(self, client: BaseClient) -> None:
        self._clients.add(client)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the metrics are known only when they are read."""
        return ()

    def collect(self) -> Iterable[Metric]:
        clients = list(self._clients)
        fleets = [fleet for client in clients if (fleet := _fleet(client)) is not None]
        yield from _nodes(fleets, clients)
        yield from _budgets(fleets)
        yield from _ledgers([client.ledger for client in clients if isinstance(client, InferenceClient)])


def _fleet(client: BaseClient) -> NPUClient | None:
    if isinstance(client, InferenceClient):
        return client.npu
    return client if isinstance(client, NPUClient) else None


def _nodes(fleets: list[NPUClient], clients: list[BaseClient]) -> Iterable[Metric]:
    usable: dict[str, bool] = {}
    in_flight: Counter[str] = Counter()
    breakers: Counter[tuple[str, str]] = Counter()
    for fleet in fleets:
        for node in fleet.status():
            usable[node.url] = usable.get(node.url, True) and node.usable
            in_flight[node.url] += node.in_flight
            breakers[node.url, node.breaker.value] += 1
    for client in clients:
        breaker = client.cloud_breaker if isinstance(client, InferenceClient) else None
        if breaker is not None:
            breakers["cloud", breaker.value] += 1
    family = GaugeMetricFamily("npu_client_node_usable", "1 if requests are sent to the node", labels=("node",))
    for url, value in usable.items():
        family.add_metric((url,), float(value))
    yield family
    family = GaugeMetricFamily("npu_client_in_flight", "Requests of this process under way there", labels=("node",))
    for url in usable:
        family.add_metric((url,), in_flight[url])
    yield family
    family = GaugeMetricFamily(
        "npu_client_breaker_state", "Clients of this process whose breaker is in that state", labels=("node", "state")
    )
    for url in sorted({url for url, _ in breakers}):
        for state in BreakerState:
            family.add_metric((url, state.value), breakers[url, state.value])
    yield family


def _budgets(fleets: list[NPUClient]) -> Iterable[Metric]:
    budgets = [fleet.fleet.dispatcher.budget for fleet in fleets]
    if budgets:
        yield GaugeMetricFamily(
            "npu_client_retry_budget",
            "Retries that could be made now, of the client that could make fewest",
            value=min(budget.balance for budget in budgets),
        )
    yield CounterMetricFamily(
        "npu_client_retries_refused",
        "Retries that the empty retry budget forbade",
        value=sum(budget.refused for budget in budgets),
    )


def _ledgers(ledgers: list[Ledger]) -> Iterable[Metric]:
    calls = CounterMetricFamily("npu_client_served_calls", "Calls that were answered, and where", labels=("source",))
    calls.add_metric(("node",), sum(ledger.local.calls for ledger in ledgers))
    calls.add_metric(("cloud",), sum(ledger.cloud.calls for ledger in ledgers))
    yield calls
    yield CounterMetricFamily(
        "npu_client_cloud_cost",
        "What the cloud cost since the process started, in the currency of the prices",
        value=float(sum(ledger.cloud.cost for ledger in ledgers)),
    )
    caps = [ledger.cap for ledger in ledgers if ledger.cap is not None]
    if caps:
        text = "What the cloud may cost in the life of the process, in the same currency"
        yield GaugeMetricFamily("npu_client_cloud_spend_cap", text, value=float(sum(caps)))
