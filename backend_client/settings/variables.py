"""Environment variables that no setting reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import get_args, get_origin

from pydantic import (
    BaseModel,
)
from pydantic_settings import (
    BaseSettings,
)

from backend_client.errors import ConfigurationError

CONFIG_VARIABLE = "NPU_CLIENT_CONFIG"


def reject_misspelt(environment: Mapping[str, str], settings: type[BaseSettings]) -> None:
    """Raise ConfigurationError for a variable with our prefix that no setting reads; a mistake would go unnoticed."""
    prefix = "NPU_CLIENT_"
    known = {CONFIG_VARIABLE, *(f"{prefix}{name}".upper() for name in _variables(settings))}
    given = sorted(name for name in environment if name.upper().startswith(prefix))
    problems = []
    for name in given:
        # A mapping's keys, such as a model's name, are anything.
        if name.upper() in known or any(name.upper().startswith(f"{start}__") for start in _open(settings)):
            continue
        close = difflib.get_close_matches(name.upper(), sorted(known), 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
        problems.append(f"{name}: there is no such setting; {hint}")
    if problems:
        raise ConfigurationError("the environment is wrong:\n  " + "\n  ".join(problems))


def _variables(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The names of all settings, nested ones with `__`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _variables(part, f"{prefix}{name}__")


def _open(model: type[BaseModel], prefix: str = "NPU_CLIENT_") -> set[str]:
    """The variables below which any further name may stand: those of mappings."""
    return {f"{prefix}{name}".upper() for name in _mappings(model)}


def _mappings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if get_origin(field.annotation) is dict:
            yield prefix + name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _mappings(part, f"{prefix}{name}__")
