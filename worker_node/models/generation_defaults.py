"""The sampling that a model's maker recommends: `generation_config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker_node.core.errors import ConfigurationError
from worker_node.models.chat_template import read_config

GENERATION_CONFIG = "generation_config.json"
# The name there, the field of `Sampling`, and the values that it may have.
_FIELDS: tuple[tuple[str, str, type[int | float], float, float], ...] = (
    ("temperature", "temperature", float, 0.0, 100.0),
    ("top_p", "top_p", float, 0.0, 1.0),
    ("top_k", "top_k", int, 0, 10_000_000),
    ("min_p", "min_p", float, 0.0, 1.0),
    ("repetition_penalty", "repetition_penalty", float, 0.01, 100.0),
    ("max_new_tokens", "max_new_tokens", int, 1, 10_000_000),
)


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Fields of `Sampling` with the model's own defaults; none for a directory without the file.

    A model that does not sample by itself (`do_sample`) is greedy. Raises ConfigurationError, naming the file and the
    key, for a file that cannot be read and for a value that makes no sense.
    """
    path = directory / GENERATION_CONFIG
    if not path.is_file():
        return {}
    config = read_config(path)
    found: dict[str, Any] = {}
    for key, field, kind, least, most in _FIELDS:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not least <= value <= most:
            raise ConfigurationError(f"{path}: {key} = {value!r} is no {kind.__name__} from {least} to {most}")
        found[field] = kind(value)
    if config.get("do_sample") is not True:
        found["temperature"] = 0.0
    elif not found.get("temperature"):
        found["temperature"] = 1.0
    if found.get("top_p") == 0:
        found |= {"top_p": 1.0, "temperature": 0.0}
    return found
