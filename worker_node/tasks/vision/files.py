"""Published files of vision-language models: directories in OpenVINO form, which are served as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from worker_node.core.errors import ConfigurationError, ConversionFailed, SourceRejected
from worker_node.models.convert.job import EXPORTED_SUFFIXES, ConversionJob, Converted, ModelFiles, copy_exported
from worker_node.models.directory import InstalledModel, compression_of, family_of, find_template, read_config, sizes
from worker_node.tasks.vision.task import VISION

LANGUAGE_FILE = "openvino_language_model.xml"
VISION_FILE = "openvino_vision_embeddings_model.xml"
_GRAPHS = (
    LANGUAGE_FILE,
    VISION_FILE,
    "openvino_text_embeddings_model.xml",
    "openvino_tokenizer.xml",
    "openvino_detokenizer.xml",
)
_NEEDED = (
    *(name for graph in _GRAPHS for name in (graph, graph.replace(".xml", ".bin"))),
    "config.json",
    "preprocessor_config.json",
)
# OpenVINO GenAI 2026.4 has no pipeline for them (docs/vision.md).
UNSUPPORTED = frozenset({"smolvlm", "idefics3", "lfm2_vl", "mllama", "mistral3", "paddleocr_vl"})
# Where the configuration of the language model stands within the whole model's.
_LANGUAGE = ("text_config", "llm_config", "language_config")


class _Files(ModelFiles):
    def recognises(self, source: Path) -> bool:
        return (source / LANGUAGE_FILE).is_file() and (source / VISION_FILE).is_file()

    def weights(self, source: Path) -> list[Path]:
        return [path for name in _NEEDED if (path := source / name).is_file()]

    def of_repository(
        self, _repository: str, _architectures: Collection[str], names: Collection[str]
    ) -> Collection[str] | None:
        if LANGUAGE_FILE not in names or VISION_FILE not in names:
            return None
        if missing := [name for name in _NEEDED if name not in names]:
            raise SourceRejected(f"the repository lacks {', '.join(missing)}, so its vision model cannot be loaded")
        return [name for name in names if Path(name).suffix in EXPORTED_SUFFIXES]

    def check(self, directory: Path) -> None:
        if (kind := str(read_config(directory / "config.json").get("model_type"))) in UNSUPPORTED:
            raise ConversionFailed(f"OpenVINO GenAI has no pipeline for models of type {kind}; see docs/vision.md")

    def convert(self, job: ConversionJob, stage: Callable[[str], None]) -> Converted:
        source = Path(job.source)
        if job.quantization is not None:
            raise ConversionFailed(f"{job.id}: the weights are compressed already; leave the quantization out")
        try:
            known = open_vision(source, job.id)
        except ConfigurationError as error:
            raise ConversionFailed(error.message) from error
        stage("copying the files")
        copy_exported(job)
        return Converted(
            kind=VISION, family=known.family, quantization=known.quantization, context_limit=known.context_limit
        )

    def open(self, directory: Path, name: str) -> InstalledModel | None:
        return open_vision(directory, name)


def open_vision(directory: Path, name: str) -> InstalledModel:
    """The model of a directory. Raises ConfigurationError, naming what is missing, damaged or not supported."""
    if missing := [file for file in _NEEDED if not (directory / file).is_file()]:
        raise ConfigurationError(
            f"{directory}: {', '.join(missing)} is missing; export the model again with optimum-cli export openvino"
        )
    config = read_config(directory / "config.json")
    read_config(directory / "preprocessor_config.json")
    kind = str(config.get("model_type", ""))
    if kind in UNSUPPORTED:
        raise ConfigurationError(
            f"{directory}: OpenVINO GenAI has no pipeline for models of type {kind}; docs/vision.md names those it has"
        )
    template = find_template(directory)
    files = sizes(directory)
    changed = (directory / LANGUAGE_FILE).stat().st_mtime_ns
    return InstalledModel(
        id=name,
        kind=VISION,
        path=directory,
        context_limit=_context_limit(config, directory),
        quantization=compression_of(directory / LANGUAGE_FILE),
        family=family_of(kind, template.text if template else ""),
        source=f"directory {directory}",
        files=files,
        digest=hashlib.sha256(repr((sorted(files.items()), changed)).encode()).hexdigest(),
        installed_at=changed / 1e9,
    )


def _context_limit(config: dict[str, Any], directory: Path) -> int:
    for part in (config, *(config.get(name) for name in _LANGUAGE)):
        limit = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(limit, int) and limit > 0:
            return limit
    raise ConfigurationError(
        f"{directory / 'config.json'}: max_position_embeddings is missing, here and in {', '.join(_LANGUAGE)}"
    )


FILES = _Files()
