"""The architectures of cross-encoders that can be built, by the name that `config.json` has for them, and decoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec


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
