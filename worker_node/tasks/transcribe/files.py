"""Published files of Whisper models, taken in OpenVINO form, and of the network that finds speech for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from worker_node.models.convert.job import ConversionJob, Converted, ExportedFiles
from worker_node.models.directory import peek_config
from worker_node.tasks.transcribe.task import KIND

_ENCODER_FILE, _DECODER_FILE = "openvino_encoder_model.xml", "openvino_decoder_model.xml"
# Encoder positions of a window of 30 s; the size of a request is counted in positions.
POSITIONS = 1500
# Silero's network for voice activity, as its package has it. It is installed as a model, but takes no requests.
VOICE_MODEL, VOICE_KIND, VOICE_FILE = "silero-vad", "voice-activity", "silero_vad_16k_sequence.onnx"


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
