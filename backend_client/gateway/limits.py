"""What the gateway counts: metrics, and requests and tokens a minute of each team.

The latter in memory, or in a Redis or Valkey that gateways share.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from limits import RateLimitItemPerMinute
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import StorageError
from limits.storage import storage_from_string
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backend_client.client import InferenceClient
from backend_client.gateway.keys import Team
from backend_client.http.errors import Problem

log = logging.getLogger("npu_gateway")
R = TypeVar("R")
# A store that hangs must not hold requests up.
_PATIENCE_S = 0.5
_PAUSE_S = 1.0
_UNLIMITED = 2**53


class _AMinute(RateLimitItemPerMinute):
    """A limit a minute whose counter does not depend on it: the keys of a team share one, whatever their limits."""

    def key_for(self, *identifiers: bytes | str | float) -> str:
        return RateLimitItemPerMinute(1).key_for(*identifiers)


class Limits:
    """Windows that slide: a minute at any moment has no more than the limit, nearly.

    While the store fails, requests are let through, and `failed` is called for each: limits protect neighbours, and
    to refuse everybody would protect nobody.
    """

    def __init__(self, store: str, failed: Callable[[], None]) -> None:
        storage = (
            storage_from_string(f"async+{store}")
            if store == "memory://"
            else storage_from_string(
                f"async+{store}",
                wrap_exceptions=True,
                implementation="redispy",
                socket_timeout=_PATIENCE_S,
                socket_connect_timeout=_PATIENCE_S,
            )
        )
        self._windows = SlidingWindowCounterRateLimiter(storage)
        self._failed = failed
        self._fails = False
        self._next_try = 0.0

    async def admit(self, team: Team) -> None:
        """Count a request. Raises Problem, with the seconds until there is room, for one above a limit."""
        if (team.requests or team.tokens) and (refusal := await self._ask(self._refusal, team)) is not None:
            raise refusal

    async def used(self, team: Team, tokens: int) -> None:
        """Count tokens that were used: what is above the limit ends the window's room."""
        if team.tokens and tokens:
            # All of them, whatever the limit: another key of the team may have a higher one.
            await self._ask(lambda: self._windows.hit(_AMinute(_UNLIMITED), "tokens", team.name, cost=tokens))

    async def _ask(self, work: Callable[..., Awaitable[R]], *values: Any) -> R | None:
        """What the store answers; None while it fails: then one call a second tries it, and no other waits for it."""
        now = time.monotonic()
        if now < self._next_try:
            self._failed()
            return None
        if self._fails:
            self._next_try = now + _PAUSE_S
        try:
            async with asyncio.timeout(_PATIENCE_S):
                found = await work(*values)
        except (StorageError, TimeoutError) as error:
            self._failed()
            if not self._fails:
                log.warning("limits are not counted: their store fails (%s)", type(error).__name__)
            self._fails, self._next_try = True, time.monotonic() + _PAUSE_S
            return None
        self._fails, self._next_try = False, 0.0
        return found

    async def _refusal(self, team: Team) -> Problem | None:
        for kind, most, cost in (("tokens", team.tokens, 0), ("requests", team.requests, 1)):
            if most and not await self._fits(kind, most, team, cost):
                wait = await self._wait(kind, most, team)
                return Problem(429, "overloaded", f"this key's team may use {most} {kind} a minute", wait)
        return None

    async def _fits(self, kind: str, most: int, team: Team, cost: int) -> bool:
        item = _AMinute(most)
        if cost:
            return bool(await self._windows.hit(item, kind, team.name, cost=cost))
        return bool(await self._windows.test(item, kind, team.name))

    async def _wait(self, kind: str, most: int, team: Team) -> float:
        stats = await self._windows.get_window_stats(_AMinute(most), kind, team.name)
        return max(1.0, stats.reset_time - time.time())


class Metrics:
    """The gateway's own counters, and what the client knows of its nodes."""

    def __init__(self, client: InferenceClient) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        by = "dialect", "team", "status"
        self.requests = counter("npu_gateway_requests", "Requests by dialect, team and status", by)
        self.tokens = counter("npu_gateway_tokens", "Tokens that replies say they used", ("team", "kind"))
        self.answers = counter("npu_gateway_answers", "Answers by who gave them: node or cloud", ("source",))
        self.attempts = counter("npu_gateway_attempts", "Tries on nodes and the cloud")
        what = "Times that the store of limits and spend caps failed"
        self.store_failures = counter("npu_gateway_store_failures", what)
        self.refused_keys = counter("npu_gateway_refused_keys", "Requests without a valid key")
        self.registered = gauge("npu_gateway_registered_nodes", "Nodes that announced themselves lately")
        what = "Share of a team's spend cap that this month's cloud calls used or reserved"
        self.spend_ratio = gauge("npu_gateway_spend_ratio", what, ("team",))
        self.in_flight = gauge("npu_gateway_in_flight", "Requests under way")
        self.registry.register(_Nodes(client))
        if find_spec("opentelemetry") is not None:
            # With the extra `observability`: durations, tokens and attempts of the client's calls, and their spans.
            from backend_client import observability  # noqa: PLC0415

            observability.instrument(client, metrics=observability.Metrics(self.registry))


class _Nodes(Collector):
    def __init__(self, client: InferenceClient) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
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
