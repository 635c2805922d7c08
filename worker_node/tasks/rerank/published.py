"""Published files of rerankers: cross-encoders by the architecture that `config.json` names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from worker_node.core.errors import ConversionFailed, SourceRejected
from worker_node.models.convert.encoder import (
    BertConfig,
    read_bert_config,
    read_json,
    read_tokenizer,
    token_limit,
)
from worker_node.models.convert.job import ConversionJob, Converted, ModelFiles
from worker_node.models.directory import MODEL_FILE, TOKENIZER_FILE, WEIGHTS_FILE, peek_config
from worker_node.models.sources import SAFETENSORS_FILE, safetensors_of, weight_files


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
    match peek_config(directory / "config.json").get("architectures"):
        case [str(name)]:
            return name
    return None


class _Rerankers(ModelFiles):
    def recognises(self, source: Path) -> bool:
        """A directory whose `config.json` names a cross-encoder's architecture."""
        return architecture_of(source) in FAMILIES

    def weights(self, source: Path) -> list[Path]:
        exported = [source / name for name in (MODEL_FILE, WEIGHTS_FILE) if (source / MODEL_FILE).is_file()]
        files = [*(exported or weight_files(source)), source / "config.json", source / TOKENIZER_FILE]
        return [file for file in files if file.is_file()]

    def of_repository(
        self, _repository: str, architectures: Collection[str], names: Collection[str]
    ) -> Collection[str] | None:
        """The weights in either form, and the tokenizer."""
        if not FAMILIES.keys() & set(architectures):
            return None
        # As published before as exported: exports on hubs are often of another precision than they say.
        forms = [
            form for form in (safetensors_of(names), [MODEL_FILE, WEIGHTS_FILE]) if form and set(form) <= set(names)
        ]
        missing = ([] if forms else [SAFETENSORS_FILE]) + sorted({"config.json", TOKENIZER_FILE} - set(names))
        if missing:
            raise SourceRejected(
                f"the repository holds a cross-encoder and lacks {', '.join(missing)}; look for one that has them"
            )
        return (*forms[0], TOKENIZER_FILE)

    def check(self, directory: Path) -> None:
        config = read_cross_encoder_config(directory)
        read_tokenizer(directory / TOKENIZER_FILE, config.bert.vocab_size)

    def convert(self, job: ConversionJob, stage: Callable[[str], None]) -> Converted:
        from worker_node.tasks.rerank.conversion import convert_cross_encoder  # noqa: PLC0415

        return convert_cross_encoder(job, stage)


FILES = _Rerankers()


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
    bert = read_bert_config(directory, family.model_type, (architecture,), "cross-encoders")
    stated = read_json(path, _Labels)
    labels = stated.num_labels or (2 if stated.id2label is None else len(stated.id2label))
    if labels not in {1, 2}:
        raise ConversionFailed(f"{path}: the model has {labels} labels; a reranker has one, or two (no, yes)")
    first = stated.pad_token_id + 1 if family.offset else 0
    limit = min(token_limit(directory, None), bert.max_position_embeddings - first)
    return CrossEncoderConfig(family, bert, labels, first, limit)
