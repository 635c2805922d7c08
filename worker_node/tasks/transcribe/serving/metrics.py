"""What only speech recognition counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from worker_node.domain import Route
from worker_node.telemetry import Telemetry


class SpeechMetrics:
    """The task's own metrics, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"npu_node_{name}", text, ("model", "device"), registry=registry)

        self.heard = counter("audio_seconds", "Seconds of audio given to speech models")
        self._skipped = counter("audio_skipped_seconds", "Seconds of audio left out because nobody speaks in them")

    def transcribed(self, route: Route, heard_s: float, skipped_s: float) -> None:
        """Count a finished request."""
        labels = (route.model, route.device.value)
        self.heard.labels(*labels).inc(heard_s)
        self._skipped.labels(*labels).inc(max(0.0, skipped_s))


def declare_speech_metrics(telemetry: Telemetry) -> None:
    """Have the metrics there from the start."""
    telemetry.made["seconds of audio"] = telemetry.own(SpeechMetrics).heard
