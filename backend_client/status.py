"""What the client knows of its nodes, for people and for the caller's own health endpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from backend_client.fleet.breaker import BreakerState
from backend_client.fleet.node import Node
from backend_client.http.health import DeviceReport, ModelReport


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


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """For the caller's own health endpoint.

    `serving`: whether a call would find somebody now; `cloud`: the state of the cloud's breaker, None without a cloud;
    `retries_left`: what the retry budget holds; `cloud_cost`: what was spent.
    """

    serving: bool
    nodes_usable: int
    nodes: dict[str, str]
    retries_left: int
    cloud: str | None = None
    cloud_cost: str | None = None

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return asdict(self)


def client_status(nodes: tuple[NodeStatus, ...], retries_left: float) -> ClientStatus:
    """The status of a client that has these nodes and no cloud."""
    usable = sum(node.usable for node in nodes)
    states = {node.url: node.status if node.usable or not node.trouble else node.trouble for node in nodes}
    return ClientStatus(usable > 0, usable, states, int(retries_left))


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
