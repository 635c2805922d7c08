"""The replies of the dashboard's routes."""

from __future__ import annotations

from typing import Any, Literal

from worker_node.api.replies import Health, Reply


class DashboardState(Health):
    """GET /dashboard/state."""

    kind: Literal["node"]
    name: str
    at: float
    in_flight: int
    requests: int
    history: dict[str, Any]
    first_token_ms: dict[str, Any]
    routes: list[dict[str, Any]]
    made: dict[str, dict[str, int]]
    cores: int | None
    grafana: str | None
    events: list[dict[str, Any]]
    failures: list[dict[str, Any]]


class DashboardHistory(Reply):
    """GET /dashboard/history: samples by field, oldest first, each of `period_s` seconds or of more: `seconds`."""

    period_s: float
    seconds: list[float]
    requests: list[float]
