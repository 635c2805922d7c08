"""Published files of rerankers: cross-encoders by the architecture that `config.json` names, and decoders that rank."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from worker_node.core.errors import ConversionFailed, SourceRejected
from worker_node.models.convert.encoder import BertConfig, read_bert_config, read_json, token_limit
from worker_node.models.convert.job import ConversionJob, Converted, ModelFiles
from worker_node.models.directory import MODEL_FILE, WEIGHTS_FILE
from worker_node.models.sources.reference import export_command


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: the prefix of its tensors, and whether its positions begin after the padding token's."""

    model_type: str
    prefix: str
    offset: bool


FAMILIES = {
    "BertForSequenceClassification": Family("bert", "bert.", offset=False),
    "RobertaForSequenceClassification": Family("roberta", "roberta.", offset=True),
    "XLMRobertaForSequenceClassification": Family("xlm-roberta", "roberta.", offset=True),
}


def architecture_of(directory: Path) -> str | None:
    """The one architecture that `config.json` names; None where there is no readable one."""
    match _config(directory).get("architectures"):
        case [str(name)]:
            return name
    return None


def is_ranking_decoder(directory: Path) -> bool:
    """Whether it is a decoder that ranks by its name: nothing else tells it from one that chats."""
    if not (architecture_of(directory) or "").endswith("ForCausalLM"):
        return False
    return any(map(named_reranker, (directory.resolve().name, str(_config(directory).get("_name_or_path", "")))))


def named_reranker(name: str) -> bool:
    """Whether a directory or repository says in its name that it ranks."""
    return "rerank" in name.lower()


def _config(directory: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}


# Which published files are a reranking model.

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
            from worker_node.tasks.rerank.conversion import check_decoder  # noqa: PLC0415

            check_decoder(directory)
            return

        read_cross_encoder_config(directory)

    def convert(self, job: ConversionJob, stage: Callable[[str], None]) -> Converted:
        if is_ranking_decoder(Path(job.source)):
            from worker_node.tasks.rerank.conversion import convert_decoder  # noqa: PLC0415

            return convert_decoder(job, stage)
        from worker_node.tasks.rerank.conversion import convert_cross_encoder  # noqa: PLC0415

        return convert_cross_encoder(job, stage)


FILES = _Rerankers()


# What a published cross-encoder says about itself in `config.json`.


class _Labels(msgspec.Struct, frozen=True):
    # Hugging Face leaves them out where there are two.
    id2label: dict[str, Any] | None = None
    num_labels: int | None = None
    pad_token_id: int = 0


@dataclass(frozen=True, slots=True)
class CrossEncoderConfig:
    """The encoder's sizes, the number of labels, the position of the first token, and the limit in tokens of a pair."""

    family: Family
    bert: BertConfig
    labels: int
    first_position: int
    max_tokens: int


def read_cross_encoder_config(directory: Path) -> CrossEncoderConfig:
    """Read the configuration. Raises ConversionFailed, naming the file and the option, for what cannot be built."""
    architecture = architecture_of(directory)
    path = directory / "config.json"
    if architecture not in FAMILIES:
        raise ConversionFailed(f"{path}: architectures = {architecture!r}; known are {', '.join(FAMILIES)}")
    family = FAMILIES[architecture]
    bert = read_bert_config(directory, family.model_type, architecture, "cross-encoders")
    stated = read_json(path, _Labels)
    labels = stated.num_labels or (2 if stated.id2label is None else len(stated.id2label))
    if labels not in {1, 2}:
        raise ConversionFailed(f"{path}: the model has {labels} labels; a reranker has one, or two (no, yes)")
    first = stated.pad_token_id + 1 if family.offset else 0
    limit = min(token_limit(directory, None), bert.max_position_embeddings - first)
    return CrossEncoderConfig(family, bert, labels, first, limit)
