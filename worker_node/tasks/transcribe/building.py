"""Which files are speech models and how those are planned and opened; their canary is a sentence to understand."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from worker_node.core.errors import INSTALL_EXTRA, ConfigurationError, ModelNotFound
from worker_node.core.types import NOTHING, Device, Feature
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import JobEngine
from worker_node.manager.served import ServedModel
from worker_node.models.convert.job import ConversionJob, Converted, ExportedFiles
from worker_node.models.directory import InstalledModel, peek_config
from worker_node.models.store import ModelStore
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.serving.build import not_installed
from worker_node.serving.task import EnginePlan, ServedTask, Target
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.transcribe.audio import decode_audio
from worker_node.tasks.transcribe.task import (
    KIND,
    POSITIONS,
    VOICE_FILE,
    VOICE_KIND,
    VOICE_MODEL,
    AudioOptions,
    TranscribeJob,
    TranscribeOptions,
    Transcript,
)

_ENCODER_FILE, _DECODER_FILE = "openvino_encoder_model.xml", "openvino_decoder_model.xml"


class _Files(ExportedFiles):
    kind = KIND
    graph = _ENCODER_FILE
    # What GenAI's pipeline reads of a directory.
    needed = (
        _ENCODER_FILE,
        _DECODER_FILE,
        "openvino_tokenizer.xml",
        "openvino_detokenizer.xml",
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
    )
    limit = POSITIONS
    advice = (
        "most models are published in that form: npu-node pull OpenVINO/whisper-small-fp16-ov, or export one with "
        "optimum-cli export openvino"
    )

    def recognises(self, source: Path) -> bool:
        if not source.is_dir():
            return False
        if (source / VOICE_FILE).is_file():
            return True
        return peek_config(source / "config.json").get("model_type") == "whisper"

    def weights(self, source: Path) -> list[Path]:
        found = [source / "model.safetensors", source / VOICE_FILE]
        found += [(source / name).with_suffix(".bin") for name in (_ENCODER_FILE, _DECODER_FILE)]
        return [path for path in found if path.is_file()]

    def published(self, architectures: Collection[str], _names: Collection[str]) -> bool:
        return "WhisperForConditionalGeneration" in architectures

    def convert(self, job: ConversionJob, stage: Callable[[str], None]) -> Converted:
        source = Path(job.source)
        if (voice := source / VOICE_FILE).is_file():
            stage("copying the network")
            shutil.copyfile(voice, Path(job.target) / VOICE_FILE)
            return Converted(kind=VOICE_KIND, family="silero", quantization="f32", context_limit=POSITIONS)
        return super().convert(job, stage)


FILES = _Files()


def find_network(store: ModelStore) -> Path | None:
    """The network's file; None where it is not installed, or damaged."""
    try:
        path = store.get(VOICE_MODEL).path / VOICE_FILE
    except (ModelNotFound, ConfigurationError):
        return None
    return path if path.is_file() else None


# Three seconds of a LibriVox reading of "Sense and Sensibility" (public domain): "He might even have been made amiable
# himself." A small model may mishear a word; an engine that answers garbage has none of them.
_WORDS = ("might", "even", "have", "been", "made", "himself")
_ENOUGH = 5


@cache
def canary_samples() -> bytes:
    """The sentence as 16-bit PCM. Raises ConfigurationError when PyAV is not installed."""
    try:
        import av  # noqa: F401, PLC0415
    except ImportError as error:
        raise ConfigurationError(
            f"speech recognition decodes audio with PyAV, which is not installed: {INSTALL_EXTRA.format('speech')}"
        ) from error
    source = resources.files("worker_node.tasks.transcribe").joinpath("canary.ogg")
    with resources.as_file(source) as path, tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "canary.pcm"
        decode_audio(str(path), str(target), 10.0)
        return target.read_bytes()


# Resident bytes for each byte of f16 weights: the CPU widens them, and the decoder is compiled twice for the NPU.
_WEIGHTS = 3.0
_MAX_OUTSTANDING = 64


@dataclass(eq=False, slots=True)
class TranscriptionModel(ServedModel):
    """A served Whisper model. `languages` are the codes that it knows; none for an English-only model."""

    languages: frozenset[str]
    limits: AudioOptions

    @property
    def multilingual(self) -> bool:
        """Whether it takes a language, and translates."""
        return bool(self.languages)

    def facts(self) -> Mapping[str, Any]:
        return {
            "languages": sorted(self.languages) or ["en"],
            "translates": self.multilingual,
            "skips_silence": self.limits.vad,
        }


class _Transcribe(ServedTask[TranscriptionModel]):
    """Units at admission are windows of audio; their size is counted in encoder positions, 50 a second."""

    yields_to_chats = True
    keeps_emulated = False

    def plan(self, given: TranscribeOptions, target: Target) -> EnginePlan:
        on_npu, limit = target.device is Device.NPU, target.installed.context_limit
        if target.emulated and not given.precision:
            # On a CPU's bf16 the NPU's form of the decoder answers with exclamation marks.
            given = replace(given, precision="f32")
        if given.word_timestamps is None:
            given = replace(given, word_timestamps=not on_npu)
        lacks: frozenset[Feature] = NOTHING if given.word_timestamps else frozenset({"word_timestamps"})
        if on_npu:
            lacks |= {"language_detection"}  # see `engine`
        return EnginePlan(
            options=given,
            admission=AdmissionLimits(_MAX_OUTSTANDING, step_tokens=POSITIONS),
            prompt_limit=POSITIONS if on_npu else limit,
            total_limit=POSITIONS if on_npu else limit,
            memory=target.footprint(_WEIGHTS),
            lengths=(POSITIONS,) if on_npu else (),
            lacks=lacks,
        )

    def open(self, installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings) -> TranscriptionModel:
        limits = wanted.of(AudioOptions)
        store = ModelStore(settings.model_store)
        if limits.vad and find_network(store) is None:
            raise wanted.error("vad", f"vad needs {VOICE_MODEL}, which {not_installed(VOICE_MODEL, store.root)}")
        path = installed.path / "generation_config.json"
        try:
            content = json.loads(path.read_bytes())
            known = content.get("lang_to_id") or {} if content.get("is_multilingual") else {}
            languages = frozenset(str(name).strip("<|>") for name in known)
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigurationError(f"{path}: not readable ({error}); pull or export the model again") from error
        return TranscriptionModel(installed, languages, limits)

    def canary(self, model: TranscriptionModel, wanted: ModelSettings, plan: EnginePlan) -> Canary:  # noqa: ARG002
        samples = canary_samples()

        async def examine(engine: JobEngine) -> None:
            job = TranscribeJob(0, samples, time.monotonic() + CANARY_TIMEOUT_S, language="en")
            async with aclosing(engine.run(job, Transcript)) as results:
                text = (await anext(results)).text
            words = set(re.findall(r"[a-z]+", text.lower()))
            found = sum(word in words for word in _WORDS)
            if found < _ENOUGH:
                raise CanaryFailed(
                    f"{model.id} understood {found} of {len(_WORDS)} words of a sentence; {_ENOUGH} are right"
                )

        return examine


TRANSCRIBE = _Transcribe()
