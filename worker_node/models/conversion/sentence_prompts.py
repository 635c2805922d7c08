"""Reads how a sentence encoder wants queries and documents marked, and to which sizes its vectors may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from worker_node.models.conversion.job import ConversionJob
from worker_node.models.conversion.sentence_config import read_json

# The names that models use for their prompts, by what the text is.
_NAMES = {
    "query": ("query", "search_query"),
    "document": ("document", "passage", "search_document"),
}


class _Prompts(msgspec.Struct, frozen=True):
    prompts: dict[str, str | None] | None = None


class _Pooling(msgspec.Struct, frozen=True):
    include_prompt: bool = True


class _Sizes(msgspec.Struct, frozen=True):
    matryoshka_dimensions: tuple[int, ...] | None = None


def prompts_of(directory: Path, job: ConversionJob) -> Mapping[str, str]:
    """The texts before a `query` and a `document`: both, or none where the model marks neither.

    A kind without a prompt beside one that has it gets "": its texts go in as they are. A model whose pooling leaves
    the prompt out has none here. Raises ConversionFailed for a damaged file.
    """
    pooling = directory / "1_Pooling" / "config.json"
    if pooling.is_file() and not read_json(pooling, _Pooling).include_prompt:
        return {}
    path = directory / "config_sentence_transformers.json"
    declared = (read_json(path, _Prompts).prompts if path.is_file() else None) or {}
    found = {
        kind: next((prompt for name in names if (prompt := declared.get(name))), "") for kind, names in _NAMES.items()
    }
    # Empty ones are what sentence-transformers writes for a model that declares none.
    return found if any(found.values()) else job.prompts


def matryoshka_of(directory: Path, job: ConversionJob, dimensions: int) -> tuple[int, ...]:
    """The sizes, smaller than `dimensions` and ascending, to which vectors may be cut; none where none is declared.

    Raises ConversionFailed for a damaged `config.json`.
    """
    path = directory / "config.json"
    declared = read_json(path, _Sizes).matryoshka_dimensions if path.is_file() else None
    return tuple(sorted({size for size in declared or job.matryoshka if 0 < size < dimensions}))
