"""InferenceClient: the NPUs first, then the cloud."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from backend_client._api.base_client import BaseClient
from backend_client._api.npu_client import NPUClient
from backend_client._api.status import ClientStatus
from backend_client._cloud.ledger import Ledger
from backend_client._resilience.breaker import BreakerState
from backend_client._resilience.deadline import Clock
from backend_client._routing.fallback import FallbackBackend
from backend_client.errors import ConfigurationError
from backend_client.settings import ClientSettings

if TYPE_CHECKING:
    from backend_client._api.cloud_client import CloudClient


class InferenceClient(BaseClient):
    """The same methods as NPUClient; what no node can serve goes to the cloud, where that is allowed.

    `ledger` counts what was kept local, what went to the cloud, and its cost. `local_only` forbids the cloud for all
    calls, and can be given to each. Closing it closes both clients.
    """

    def __init__(
        self,
        npu: NPUClient,
        cloud: CloudClient | None = None,
        *,
        local_only: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        if not isinstance(npu, NPUClient) or not isinstance(cloud, BaseClient | None):
            raise ConfigurationError("InferenceClient takes an NPUClient and, for the fallback, a CloudClient")
        self.npu = npu
        self._cloud = cloud
        self._local_only = local_only
        self.ledger = cloud.ledger if cloud else Ledger({})
        backend = FallbackBackend(
            npu.backend,
            cloud.backend if cloud else None,
            self.ledger,
            npu.options.fallback,
            local_only=local_only,
        )
        super().__init__(backend, npu.options, clock)

    @classmethod
    def from_settings(cls, settings: ClientSettings | None = None, **options: Any) -> Self:
        """The client that the settings describe (read from file and environment when not given).

        `options` are settings that go before those. Raises ConfigurationError.
        """
        settings = ClientSettings.with_values(settings, options)
        cloud = None
        if settings.cloud is not None:
            # Imported lazily: slow, and only the cloud needs it.
            from backend_client._api.cloud_client import CloudClient  # noqa: PLC0415

            cloud = CloudClient(settings.cloud, options=settings.options())
        return cls(NPUClient.from_settings(settings), cloud, local_only=settings.local_only)

    @property
    def cloud_breaker(self) -> BreakerState | None:
        """Whether the cloud is ejected after failures; None without a cloud."""
        return None if self._cloud is None else self._cloud.backend.breaker.state

    def healthz(self) -> ClientStatus:
        """What a service may show on its own health endpoint; it makes no network calls."""
        nodes = self.npu.healthz()
        if self._cloud is None:
            return nodes
        breaker = self._cloud.backend.breaker
        reachable = breaker.admits() and not self._local_only and not self._core.calls.closed
        return replace(
            nodes,
            serving=nodes.serving or reachable,
            cloud=breaker.state.value,
            cloud_cost=f"{self.ledger.cloud.cost:f}",
        )

    def __repr__(self) -> str:
        return f"InferenceClient({self.npu!r})"
