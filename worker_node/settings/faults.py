"""Faults on demand: what an engine is to do wrong, and when, so that users can test what depends on a node."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device

_MOST_BYTES = 100_000


class Fault(BaseModel):
    """One fault of the engines of a model (default: of all) on a device (default: on any).

    Requests are counted in each engine process, the canary's among them: it strikes the first one after `after`, and
    each `every`th from there; `beyond_tokens`: only those with longer prompts, texts or recordings. `seconds` are those
    of a slow compile. Equal seeds make equal garbage.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["garbage", "stale_audio", "still_counter", "lost_device", "slow_compile", "crash", "hang"]
    # It is shown by clients, on one line.
    model: str | None = Field(default=None, max_length=200, pattern="^[^\x00-\x1f\x7f-\x9f]*$")
    device: Device | None = None
    after: int = Field(default=0, ge=0)
    every: int = Field(default=1, ge=1)
    beyond_tokens: int = Field(default=0, ge=0)
    seconds: float = Field(default=60.0, ge=0, le=3600)
    seed: int = 0

    def applies(self, model: str, device: Device) -> bool:
        """Whether it is one of the engine of a model on a device."""
        return self.model in {None, model} and self.device in {None, device}

    def __str__(self) -> str:
        given = self.model_dump(mode="json", exclude_unset=True, exclude={"kind"})
        return " ".join([self.kind, *(f"{name}={value}" for name, value in given.items())])


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    fault: tuple[Fault, ...]


def read_faults(path: Path | None) -> tuple[Fault, ...]:
    """The faults of a TOML file, `[[fault]]` each; none without a file. Raises ConfigurationError."""
    if path is None:
        return ()
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigurationError(f"faults must be a file of at most {_MOST_BYTES} bytes, got {path}")
        return _File.model_validate(tomllib.loads(content.decode())).fault
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise ConfigurationError(f"faults must be a TOML file of [[fault]] tables, and {path} is not: {problem}")
