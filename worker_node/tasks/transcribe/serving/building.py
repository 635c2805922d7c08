"""How speech recognition models are built, examined and admitted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device
from worker_node.engines.cpu_share import CpuRole
from worker_node.manager.served import ServedModel
from worker_node.models.manifest import InstalledModel
from worker_node.models.store import ModelStore
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.scheduling.routing import NOTHING, Feature
from worker_node.scheduling.wait_estimate import Capacity
from worker_node.serving.build import not_installed
from worker_node.serving.task import EnginePlan, Footprint, ModelParts, ServedTask, Shapes
from worker_node.settings import ModelSettings
from worker_node.settings.declaration import EngineOptions
from worker_node.tasks.transcribe.files import POSITIONS, VOICE_MODEL
from worker_node.tasks.transcribe.options import AudioOptions, TranscribeOptions
from worker_node.tasks.transcribe.serving.canary import speech_canary
from worker_node.tasks.transcribe.serving.voice import find_network

# Resident bytes for each byte of f16 weights: the CPU widens them, and the decoder is compiled twice for the NPU.
_WEIGHTS = 3.0
_MAX_OUTSTANDING = 64


@dataclass(frozen=True, slots=True)
class TranscriptionModel(ServedModel):
    """A served Whisper model. `languages` are the codes that it knows; none for an English-only model."""

    languages: frozenset[str]
    limits: AudioOptions

    @property
    def multilingual(self) -> bool:
        """Whether it can be told a language, and translates."""
        return bool(self.languages)

    def facts(self) -> Mapping[str, Any]:
        """See `ServedModel.facts`."""
        return {
            "languages": sorted(self.languages) or ["en"],
            "translates": self.multilingual,
            "skips_silence": self.limits.vad,
        }


class _Transcribe(ServedTask):
    cpu_role = CpuRole.YIELDS

    def build(self, parts: ModelParts) -> TranscriptionModel:
        installed, limits = parts.installed, parts.wanted.of(AudioOptions)
        store = ModelStore(parts.settings.model_store)
        if limits.vad and find_network(store) is None:
            raise parts.wanted.error(
                "vad",
                f"vad needs {VOICE_MODEL}, which {not_installed(VOICE_MODEL, store.root)}",
            )
        examination = speech_canary(installed)
        return TranscriptionModel(
            installed,
            parts.place(lambda _limit: examination),
            _languages(installed),
            limits,
            aliases=parts.wanted.aliases,
            idle_unload_s=parts.wanted.idle_unload_s,
        )

    def admission(self, options: EngineOptions) -> AdmissionLimits:  # noqa: ARG002
        """Units are windows of audio; their size is counted in encoder positions, 50 a second."""
        return AdmissionLimits(_MAX_OUTSTANDING, capacity=Capacity(step_tokens=POSITIONS))

    def static_shapes(
        self,
        installed: InstalledModel,  # noqa: ARG002
        wanted: ModelSettings,
        values: dict[str, Any],
        *,
        emulated: bool,
    ) -> Shapes:
        if emulated and not wanted.options.get("precision"):
            # On a CPU's bf16 the NPU's form of the decoder answers with exclamation marks.
            values["precision"] = "f32"
        return Shapes((POSITIONS,), POSITIONS, POSITIONS)

    def footprint(self, _installed: InstalledModel, _plan: EnginePlan) -> Footprint:
        return Footprint(weights=_WEIGHTS)

    def lacks(self, options: EngineOptions) -> frozenset[Feature]:
        """On the NPU a language cannot be detected: see `runner`."""
        on_npu = isinstance(options, TranscribeOptions) and options.busy_counter is not None
        return frozenset({"language_detection"}) if on_npu else NOTHING

    def keeps_compiled(self, device: Device, *, emulated: bool) -> bool:
        """On the emulated NPU compiling takes seconds, and keeping it a copy of all weights."""
        return device is not Device.CPU and not emulated


def _languages(installed: InstalledModel) -> frozenset[str]:
    path = installed.path / "generation_config.json"
    try:
        content = json.loads(path.read_bytes())
        known = content.get("lang_to_id") or {}
        return frozenset(str(name).strip("<|>") for name in known) if content.get("is_multilingual") else frozenset()
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{path}: not readable ({error}); pull or export the model again") from error


TRANSCRIBE = _Transcribe()
