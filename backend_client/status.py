"""What the client knows of its nodes, for people and for the caller's own health endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from backend_client.fleet.breaker import BreakerState
from backend_client.fleet.node import Node
from backend_client.fleet.report import DeviceReport, ModelReport


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node as this client sees it.

    `status` is the node's own word, or "unknown" before its first probe, "unreachable" when that failed; `usable` says
    whether requests go there; `trouble` why not. `in_flight` counts this client's requests.
    """

    url: str
    status: str
    usable: bool
    breaker: BreakerState
    trouble: str | None
    in_flight: int
    version: str | None
    models: tuple[ModelReport, ...]
    devices: tuple[DeviceReport, ...]


def node_status(node: Node) -> NodeStatus:
    """The node's status now."""
    report = node.report
    answers = node.breaker.state is BreakerState.CLOSED or not node.probe_failures
    silent = "unreachable" if node.probed else "unknown"
    return NodeStatus(
        url=node.url,
        status=report.status if report is not None and answers else silent,
        usable=report is not None and report.serving and node.breaker.admits() and answers,
        breaker=node.breaker.state,
        trouble=node.trouble,
        in_flight=node.outstanding.total(),
        version=report.version if report else None,
        models=report.models if report else (),
        devices=report.devices if report else (),
    )
