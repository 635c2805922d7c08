"""Settings: defaults, then a TOML file, then `NPU_CLIENT_*` in the environment, then arguments."""

from backend_client.settings.client import ClientSettings
from backend_client.settings.cloud import CloudSettings, Price
from backend_client.settings.sections import (
    BatchSettings,
    BreakerSettings,
    FallbackSettings,
    HedgeSettings,
    ProbeSettings,
    RetrySettings,
    TimeoutSettings,
)

__all__ = [
    "BatchSettings",
    "BreakerSettings",
    "ClientSettings",
    "CloudSettings",
    "FallbackSettings",
    "HedgeSettings",
    "Price",
    "ProbeSettings",
    "RetrySettings",
    "TimeoutSettings",
]
