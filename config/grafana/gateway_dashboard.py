"""The dashboard of the gateways: who asks, who answers, what it costs."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.models.common import StackingMode
from panels import HALF, THIRD, at_most, board, graph, number

_R = "[$__rate_interval]"


def gateway_dashboard() -> Dashboard:
    """All gateways together: teams, answers by node and cloud, nodes as the gateways see them."""
    built = board("npu-gateway", "NPU gateways", "All gateways and their teams. The alerts: docs/alerts.md")
    for section in (_now, _teams, _nodes):
        section(built)
    return built


def _now(built: Dashboard) -> None:
    built.with_row(Row("Now"))
    up = 'sum(up{job="npu-gateway"}) / count(up{job="npu-gateway"})'
    text = "Gateways that Prometheus reaches, of those that it knows."
    built.with_panel(number("Gateways up", text, "percentunit", (up, "up"), thresholds=((None, "red"), (1, "green"))))
    text = "Of all gateways; health checks and scrapes are among them."
    built.with_panel(number("Requests", text, "reqps", (f"sum(rate(npu_gateway_requests_total{_R}))", "requests/s")))
    in_flight = "sum(npu_gateway_in_flight)"
    built.with_panel(
        number("In flight", "Requests under way, open streams included.", "short", (in_flight, "requests"))
    )
    failed = (
        f'(sum(rate(npu_gateway_requests_total{{status=~"5.."}}{_R})) or vector(0))'
        f" / sum(rate(npu_gateway_requests_total{_R}))"
    )
    text = "Answers with a status of 500 or more, of all; a caller's own mistakes are none."
    built.with_panel(number("Failed", text, "percentunit", (failed, "share"), thresholds=at_most(0.01, 0.05)))
    cloud = (
        f'(sum(rate(npu_gateway_answers_total{{source="cloud"}}{_R})) or vector(0))'
        f" / sum(rate(npu_gateway_answers_total{_R}))"
    )
    text = "Answers that the cloud gave, of all answers."
    built.with_panel(number("From the cloud", text, "percentunit", (cloud, "share"), thresholds=at_most(0.05, 0.1)))
    attempts = f'sum(rate(npu_client_attempts_total{{job="npu-gateway"}}{_R}))'
    tries = f"{attempts} / sum(rate(npu_gateway_answers_total{_R}))"
    text = "1 when nothing is retried."
    built.with_panel(number("Attempts", text, "short", (tries, "for each answer"), thresholds=at_most(1.1, 2)))
    refused = "sum(increase(npu_gateway_refused_keys_total[10m]))"
    text = "Requests without a valid key, in ten minutes."
    built.with_panel(number("Keys refused", text, "short", (refused, "keys"), thresholds=at_most(10, 50)))
    failures = "sum(increase(npu_gateway_store_failures_total[10m]))"
    text = "Times that the store of limits and spending failed, in ten minutes."
    built.with_panel(number("Store failures", text, "short", (failures, "failures"), thresholds=at_most(1, 10)))


def _teams(built: Dashboard) -> None:
    built.with_row(Row("Teams"))
    requests = f"sum by (team, status) (rate(npu_gateway_requests_total{_R}))"
    text = "429: a limit of the team, or full nodes; 499: the caller left."
    built.with_panel(graph("Requests by team", text, "reqps", (requests, "{{team}} {{status}}"), width=HALF))
    tokens = f"sum by (team, kind) (rate(npu_gateway_tokens_total{_R}))"
    text = "Tokens that replies say they used."
    built.with_panel(graph("Tokens by team", text, "tokens/s", (tokens, "{{team}} {{kind}}"), width=HALF))
    dialects = f"sum by (dialect) (rate(npu_gateway_requests_total{_R}))"
    text = "Which API the callers speak."
    built.with_panel(graph("Dialects", text, "reqps", (dialects, "{{dialect}}"), stacked=StackingMode.NORMAL))
    sources = f"sum by (source) (rate(npu_gateway_answers_total{_R}))"
    text = "Answers by who gave them: a node or the cloud."
    built.with_panel(graph("Answers by source", text, "reqps", (sources, "{{source}}"), stacked=StackingMode.NORMAL))
    spent = "max by (team) (npu_gateway_spend_ratio)"
    text = "Of this month's cap; at 1 the cloud is not asked for the team any more. Only teams with a cap have it."
    built.with_panel(
        graph("Of the spend cap", text, "percentunit", (spent, "{{team}}"), thresholds=at_most(0.5, 0.8), highest=1)
    )


def _nodes(built: Dashboard) -> None:
    built.with_row(Row("Nodes as the gateways see them"))
    models = "min by (model) (npu_gateway_model_nodes)"
    text = "Usable nodes that serve each model, by the gateway that sees fewest."
    built.with_panel(graph("Usable nodes by model", text, "short", (models, "{{model}}")))
    usable = "sum by (instance) (npu_gateway_node_usable)"
    text = "Nodes that each gateway would send a request to; gateways that differ do not reach the same nodes."
    built.with_panel(graph("Usable nodes by gateway", text, "short", (usable, "{{instance}}")))
    registered = "max(npu_gateway_registered_nodes)"
    text = "Nodes that announced themselves lately, beside those that the settings name."
    built.with_panel(graph("Registered nodes", text, "short", (registered, "registered"), width=THIRD))
