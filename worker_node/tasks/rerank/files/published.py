"""Which published files are a reranking model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from worker_node.models.conversion.job import ConversionJob
from worker_node.models.conversion.result import Converted
from worker_node.models.files import ModelFiles
from worker_node.models.manifest import MODEL_FILE, WEIGHTS_FILE


class _CrossEncoders(ModelFiles):
    def recognises(self, source: Path) -> bool:
        """A directory whose `config.json` names a cross-encoder's architecture."""
        # Imports OpenVINO's helpers' neighbours only where there is something to look at.
        if not (source / "config.json").is_file():
            return False
        from worker_node.tasks.rerank.files.config import FAMILIES, architecture_of  # noqa: PLC0415

        return architecture_of(source) in FAMILIES

    def weights(self, source: Path) -> list[Path]:
        names = (MODEL_FILE, WEIGHTS_FILE) if (source / MODEL_FILE).is_file() else ("model.safetensors",)
        return [source / name for name in (*names, "config.json", "tokenizer.json") if (source / name).is_file()]

    def convert(self, job: ConversionJob, stage: Callable[[str], None]) -> Converted:
        from worker_node.tasks.rerank.files.conversion import convert_cross_encoder  # noqa: PLC0415

        return convert_cross_encoder(job, stage)


FILES = _CrossEncoders()
