"""What the gateway counts: metrics, and requests and tokens a minute of each team.

The latter in memory, or in a Redis or Valkey that gateways share.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from limits import RateLimitItemPerMinute
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.storage import storage_from_string
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from backend_client import observability
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


class StoreGuard:
    """Notes whether a store fails: then one call in `_PAUSE_S` tries it, and the others fail at once.

    `failed` is called for each call that fails.
    """

    def __init__(self, name: str, failed: Callable[[], None]) -> None:
        self._name = name
        self._failed = failed
        self._fails = False
        self._next_try = 0.0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Raises OSError where the block cannot ask the store, or fails with an error of it."""
        now = time.monotonic()
        try:
            if now < self._next_try:
                raise ConnectionError
            if self._fails:
                # This call tries it, and no other waits for it.
                self._next_try = now + _PAUSE_S
            yield
        except (OSError, RedisError) as error:
            self._failed()
            problem = f"the store of {self._name} fails ({type(error).__name__})"
            if not self._fails:
                log.warning("%s", problem)
            self._fails, self._next_try = True, max(self._next_try, time.monotonic() + _PAUSE_S)
            raise OSError(problem) from None
        self._fails, self._next_try = False, 0.0


class Limits:
    """Windows that slide: a minute at any moment has no more than the limit, nearly.

    While the store fails, requests are let through: limits protect neighbours, and to refuse everybody would protect
    nobody.
    """

    def __init__(self, store: str, failed: Callable[[], None]) -> None:
        times = {"socket_timeout": _PATIENCE_S, "socket_connect_timeout": _PATIENCE_S}
        storage = storage_from_string(f"async+{store}", implementation="redispy", **times)
        self._windows = SlidingWindowCounterRateLimiter(storage)
        self._guard = StoreGuard("the limits", failed)

    async def admit(self, team: Team) -> None:
        """Count a request. Raises Problem, with the seconds until there is room, for one above a limit."""
        for kind, most in (("tokens", team.tokens), ("requests", team.requests)):
            # A request is counted when it comes, its tokens when it is answered.
            count = self._windows.hit if kind == "requests" else self._windows.test
            if most and await self._ask(count, _AMinute(most), kind, team.name) is False:
                stats = await self._ask(self._windows.get_window_stats, _AMinute(most), kind, team.name)
                wait = stats.reset_time - time.time() if stats else 0.0
                message = f"this key's team may use {most} {kind} a minute"
                raise Problem(429, "overloaded", message, max(1.0, wait))

    async def used(self, team: Team, tokens: int) -> None:
        """Count tokens that were used: what is above the limit ends the window's room."""
        if team.tokens and tokens:
            # All of them, whatever the limit: another key of the team may have a higher one.
            await self._ask(partial(self._windows.hit, cost=tokens), _AMinute(_UNLIMITED), "tokens", team.name)

    async def close(self) -> None:
        bridge: Any = getattr(self._windows.storage, "bridge", None)
        if bridge is not None:
            # The library keeps its client of Redis open.
            await bridge.get_connection().aclose()

    async def _ask(self, method: Callable[..., Awaitable[R]], item: _AMinute, kind: str, team: str) -> R | None:
        """What the store answers; None while it fails."""
        with suppress(OSError), self._guard.asking():
            async with asyncio.timeout(_PATIENCE_S):
                return await method(item, kind, team)
        return None


class Metrics:
    """The gateway's own counters, the client's of its calls, and what it knows of its nodes."""

    def __init__(self, client: InferenceClient) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        by = "dialect", "team", "status"
        self.requests = counter("npu_gateway_requests", "Requests by dialect, team and status", by)
        self.tokens = counter("npu_gateway_tokens", "Tokens that replies say they used", ("team", "kind"))
        self.answers = counter("npu_gateway_answers", "Answers by who gave them: node or cloud", ("source",))
        what = "Times that the store of limits and spend caps failed"
        self.store_failures = counter("npu_gateway_store_failures", what)
        self.refused_keys = counter("npu_gateway_refused_keys", "Requests without a valid key")
        self.registered = gauge("npu_gateway_registered_nodes", "Nodes that announced themselves lately")
        what = "Share of a team's spend cap that this month's cloud calls used or reserved"
        self.spend_ratio = gauge("npu_gateway_spend_ratio", what, ("team",))
        self.in_flight = gauge("npu_gateway_in_flight", "Requests under way")
        self.registry.register(_Nodes(client))
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
