"""Which tracing a node has."""

from __future__ import annotations

from worker_node.errors import ConfigurationError
from worker_node.tracing.base import OFF, Tracing


def open_tracing(*, enabled: bool) -> Tracing:
    """The tracing that the settings ask for. Raises ConfigurationError when what it needs is not installed."""
    if not enabled:
        return OFF
    try:
        # Who does not trace need not have OpenTelemetry, nor pay for importing it.
        from worker_node.tracing.export import otlp_tracing  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            f"tracing is on and {error.name} is not installed; run: pip install 'npu-node[tracing]', or leave "
            "tracing out"
        ) from error
    return otlp_tracing()
