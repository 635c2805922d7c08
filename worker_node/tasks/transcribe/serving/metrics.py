"""Metrics of speech recognition alone."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from worker_node.core.types import Route
from worker_node.observability.metrics import Tally, Telemetry


class SpeechMetrics:
    """The task's own metrics, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def tally(name: str, text: str) -> Tally:
            return Tally(f"npu_node_{name}", text, ("model", "device"), registry)

        self.heard = tally("audio_seconds", "Seconds of audio given to speech models")
        self._skipped = tally("audio_skipped_seconds", "Seconds of audio left out because nobody speaks in them")

    def transcribed(self, route: Route, heard_s: float, skipped_s: float) -> None:
        """Count a finished request."""
        labels = (route.model, route.device)
        self.heard.add(heard_s, *labels)
        self._skipped.add(max(0.0, skipped_s), *labels)


def declare_speech_metrics(telemetry: Telemetry) -> None:
    """Create the metrics at start, so that they are exported from then on."""
    telemetry.made["seconds of audio"] = telemetry.own(SpeechMetrics).heard
