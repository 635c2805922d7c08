"""Which published files are a reranking model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from worker_node.core.errors import SourceRejected
from worker_node.models.convert.job import ConversionJob, Converted
from worker_node.models.files import ModelFiles
from worker_node.models.manifest import MODEL_FILE, WEIGHTS_FILE
from worker_node.models.sources.reference import export_command
from worker_node.tasks.rerank.files.architectures import (
    FAMILIES,
    architecture_of,
    is_ranking_decoder,
    named_reranker,
)

TOKENIZER_FILE = "tokenizer.json"


class _Rerankers(ModelFiles):
    def recognises(self, source: Path) -> bool:
        """A directory whose `config.json` names a cross-encoder's architecture, or that is a decoder that ranks."""
        return architecture_of(source) in FAMILIES or is_ranking_decoder(source)

    def weights(self, source: Path) -> list[Path]:
        names = (MODEL_FILE, WEIGHTS_FILE) if (source / MODEL_FILE).is_file() else ("model.safetensors",)
        return [source / name for name in (*names, "config.json", TOKENIZER_FILE) if (source / name).is_file()]

    def of_repository(
        self, repository: str, architectures: Collection[str], names: Collection[str]
    ) -> Collection[str] | None:
        """The weights in either form, and the tokenizer."""
        if named_reranker(repository) and any(name.endswith("ForCausalLM") for name in architectures):
            return self._of_decoder(repository, names)
        if not FAMILIES.keys() & set(architectures):
            return None
        # As published before as exported: exports on hubs are often of another precision than they say.
        forms = [form for form in (("model.safetensors",), (MODEL_FILE, WEIGHTS_FILE)) if set(form) <= set(names)]
        missing = ([] if forms else ["model.safetensors"]) + sorted({"config.json", TOKENIZER_FILE} - set(names))
        if missing:
            raise SourceRejected(
                f"the repository holds a cross-encoder and lacks {', '.join(missing)}; look for one that has them"
            )
        return (*forms[0], TOKENIZER_FILE)

    def _of_decoder(self, repository: str, names: Collection[str]) -> Collection[str]:
        if MODEL_FILE not in names:
            raise SourceRejected(
                f"{repository} holds a decoder that ranks, which must be exported first: "
                + export_command(repository, f"{repository.rpartition('/')[2].lower()}-ov")
            )
        wanted = (MODEL_FILE, WEIGHTS_FILE, "config.json", TOKENIZER_FILE)
        if missing := sorted(set(wanted) - set(names)):
            raise SourceRejected(f"{repository} holds a decoder that ranks and lacks {', '.join(missing)}")
        return wanted

    def check(self, directory: Path) -> None:
        if is_ranking_decoder(directory):
            from worker_node.tasks.rerank.files.decoders import check_decoder  # noqa: PLC0415

            check_decoder(directory)
            return
        from worker_node.tasks.rerank.files.config import read_cross_encoder_config  # noqa: PLC0415

        read_cross_encoder_config(directory)

    def convert(self, job: ConversionJob, stage: Callable[[str], None]) -> Converted:
        if is_ranking_decoder(Path(job.source)):
            from worker_node.tasks.rerank.files.decoders import convert_decoder  # noqa: PLC0415

            return convert_decoder(job, stage)
        from worker_node.tasks.rerank.files.conversion import convert_cross_encoder  # noqa: PLC0415

        return convert_cross_encoder(job, stage)


FILES = _Rerankers()
