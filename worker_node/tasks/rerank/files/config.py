"""What a published cross-encoder says about itself in `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.encoder import BertConfig, read_bert_config, read_json, token_limit
from worker_node.tasks.rerank.files.architectures import FAMILIES, Family, architecture_of


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
