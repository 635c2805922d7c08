"""CloudClient: the fallback by itself."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any, Self

from backend_client.calls import BaseClient
from backend_client.cloud.backend import CloudBackend
from backend_client.cloud.ledger import Ledger
from backend_client.errors import ConfigurationError
from backend_client.fleet.node import Availability
from backend_client.lifetime import Clock
from backend_client.options import ClientOptions
from backend_client.settings import ClientSettings, CloudSettings


class CloudClient(BaseClient):
    """Calls an OpenAI-compatible API, with the same methods as NPUClient. `ledger` counts tokens and cost.

    Embeddings are served by the models of `settings.embedding_models` only; their results are in the mapped space.
    """

    def __init__(
        self,
        settings: CloudSettings,
        *,
        options: ClientOptions | None = None,
        ledger: Ledger | None = None,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        if not isinstance(settings, CloudSettings):
            raise ConfigurationError("CloudClient takes CloudSettings")
        options = options or ClientOptions()
        self.ledger = ledger or Ledger(settings.prices, settings.spend_cap)
        new_availability = partial(Availability, options.breaker, clock, rng or random.Random())
        self.service = CloudBackend(settings, new_availability, self.ledger, clock, options)
        super().__init__(self.service, self.service, options, clock)

    @classmethod
    def from_settings(cls, settings: ClientSettings | None = None, **options: Any) -> Self:
        """The client for the settings' `cloud`. Raises ConfigurationError when there is none."""
        settings = ClientSettings.with_values(settings, options)
        if settings.cloud is None:
            raise ConfigurationError("no cloud is configured: set NPU_CLIENT_CLOUD__API_KEY")
        return cls(settings.cloud, options=settings.options())
