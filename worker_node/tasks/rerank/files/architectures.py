"""The architectures of cross-encoders that can be built, by the name that `config.json` has for them."""

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
    try:
        config = msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None
    match config.get("architectures"):
        case [str(name)]:
            return name
    return None
