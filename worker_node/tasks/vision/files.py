"""Published files of vision-language models: directories in OpenVINO form, which are served as they are."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.job import ExportedFiles
from worker_node.models.directory import read_config
from worker_node.tasks.vision.task import VISION

_LANGUAGE_FILE = "openvino_language_model.xml"
_VISION_FILE = "openvino_vision_embeddings_model.xml"
_GRAPHS = (
    _LANGUAGE_FILE,
    _VISION_FILE,
    "openvino_text_embeddings_model.xml",
    "openvino_tokenizer.xml",
    "openvino_detokenizer.xml",
)
# OpenVINO GenAI 2026.4 has no pipeline for them (docs/vision.md).
UNSUPPORTED = frozenset({"smolvlm", "idefics3", "lfm2_vl", "mllama", "mistral3", "paddleocr_vl"})


class _Files(ExportedFiles):
    kind = VISION
    graph = _LANGUAGE_FILE
    needed = (
        *(name for graph in _GRAPHS for name in (graph, graph.replace(".xml", ".bin"))),
        "config.json",
        "preprocessor_config.json",
    )

    def recognises(self, source: Path) -> bool:
        return (source / _LANGUAGE_FILE).is_file() and (source / _VISION_FILE).is_file()

    def published(self, _architectures: Collection[str], names: Collection[str]) -> bool:
        return _LANGUAGE_FILE in names and _VISION_FILE in names

    def check(self, directory: Path) -> None:
        if (kind := str(read_config(directory / "config.json").get("model_type"))) in UNSUPPORTED:
            raise ConversionFailed(f"OpenVINO GenAI has no pipeline for models of type {kind}; see docs/vision.md")


FILES = _Files()
