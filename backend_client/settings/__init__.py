"""Settings: defaults, then a TOML file, then `NPU_CLIENT_*` in the environment, then arguments."""

from backend_client.settings.client import DEFAULT_NODE, ClientSettings
from backend_client.settings.cloud import CloudSettings, Price, checked_key
from backend_client.settings.sections import (
    BatchSettings,
    BreakerSettings,
    FallbackSettings,
    HedgeSettings,
    ProbeSettings,
    RetrySettings,
    TimeoutSettings,
)
from backend_client.settings.variables import CONFIG_VARIABLE

__all__ = [
    "CONFIG_VARIABLE",
    "DEFAULT_NODE",
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
    "checked_key",
]
