"""Published files of Whisper models (OpenAI's checkpoints, Hugging Face repositories, OpenVINO directories), and of the
network that finds speech for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from worker_node.core.errors import ConfigurationError, ConversionFailed, SourceRejected
from worker_node.models.convert.job import EXPORTED_SUFFIXES, ConversionJob, Converted, ModelFiles, copy_exported
from worker_node.models.directory import InstalledModel, peek_config, sizes
from worker_node.tasks.transcribe.task import KIND

ENCODER_FILE, DECODER_FILE = "openvino_encoder_model.xml", "openvino_decoder_model.xml"
_ARCHITECTURE = "WhisperForConditionalGeneration"
_PUBLISHED = (
    "most models are published in that form: npu-node pull OpenVINO/whisper-small-fp16-ov, or export one with "
    "optimum-cli export openvino"
)
# What GenAI's pipeline reads of a directory.
_NEEDED = (
    ENCODER_FILE,
    DECODER_FILE,
    "openvino_tokenizer.xml",
    "openvino_detokenizer.xml",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
)
# Encoder positions of a window of 30 s; the size of a request is counted in positions.
POSITIONS = 1500
# Silero's network for voice activity, as its package has it. It is installed as a model, but takes no requests.
VOICE_MODEL, VOICE_KIND, VOICE_FILE = "silero-vad", "voice-activity", "silero_vad_16k_sequence.onnx"


class _Files(ModelFiles):
    def recognises(self, source: Path) -> bool:
        if not source.is_dir():
            return False
        if (source / VOICE_FILE).is_file():
            return True
        if any(source.glob("*.pt")) and any(source.glob("*.tiktoken")):
            return True
        return peek_config(source / "config.json").get("model_type") == "whisper"

    def weights(self, source: Path) -> list[Path]:
        found = [*source.glob("*.pt"), source / "model.safetensors", source / VOICE_FILE]
        found += [(source / name).with_suffix(".bin") for name in (ENCODER_FILE, DECODER_FILE)]
        return [path for path in found if path.is_file()]

    def of_repository(
        self, repository: str, architectures: Collection[str], names: Collection[str]
    ) -> Collection[str] | None:
        if _ARCHITECTURE not in architectures:
            return None
        if missing := [name for name in _NEEDED if name not in names]:
            raise SourceRejected(
                f"{repository} lacks {', '.join(missing)}, so it is not in OpenVINO form; {_PUBLISHED}"
            )
        return [name for name in names if Path(name).suffix in EXPORTED_SUFFIXES]

    def convert(self, job: ConversionJob, stage: Callable[[str], None]) -> Converted:
        if (voice := Path(job.source) / VOICE_FILE).is_file():
            stage("copying the network")
            shutil.copyfile(voice, Path(job.target) / VOICE_FILE)
            return Converted(kind=VOICE_KIND, family="silero", quantization="f32", context_limit=POSITIONS)
        source = Path(job.source)
        if (source / ENCODER_FILE).is_file():
            _require_complete(source)
            stage("copying the files")
            copy_exported(job)
            return Converted(kind=KIND, family="whisper", quantization="as exported", context_limit=POSITIONS)
        if not any(source.glob("*.pt")):
            raise ConversionFailed(f"{source} holds a Whisper model in another form than OpenVINO's; {_PUBLISHED}")
        # Imports OpenVINO and its tokenizers: only where something is converted.
        from worker_node.models.convert.whisper import write_whisper  # noqa: PLC0415

        write_whisper(source, Path(job.target), stage)
        return Converted(kind=KIND, family="whisper", quantization="f16", context_limit=POSITIONS)

    def open(self, directory: Path, name: str) -> InstalledModel | None:
        """A directory as optimum exports it is served as it is."""
        if not (directory / ENCODER_FILE).is_file():
            return None
        try:
            _require_complete(directory)
        except ConversionFailed as error:
            raise ConfigurationError(error.message) from error
        for file in _NEEDED:
            if file.endswith(".json") and not peek_config(directory / file):
                raise ConfigurationError(f"{directory / file}: not readable as JSON; export the model again")
        return InstalledModel(
            id=name,
            kind=KIND,
            path=directory,
            context_limit=POSITIONS,
            quantization="as exported",
            family="whisper",
            source=f"directory {directory}",
            files=sizes(directory),
        )


def _require_complete(directory: Path) -> None:
    """Raises ConversionFailed, naming what is missing of a directory in OpenVINO form."""
    if missing := [file for file in _NEEDED if not (directory / file).is_file()]:
        raise ConversionFailed(
            f"{directory}: {', '.join(missing)} is missing; export the model again with optimum-cli export openvino"
        )


FILES = _Files()
