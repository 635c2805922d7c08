"""`graph.pbtxt` of an OpenVINO Model Server installation, as keys of `[[models]]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device
from worker_node.settings.model import SETTING_OF

GRAPH_FILE = "graph.pbtxt"
_MOST_CHARACTERS = 1 << 16
_OURS: Mapping[str, str] = {
    "best_of_limit": "best_of_limit",
    "cache_size": "cache_size_gb",
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_word_timestamps": "word_timestamps",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_tokens_limit": "max_tokens_limit",
    "normalize_embeddings": "normalize",
    "pooling": "pooling",
}
# A comment, a text, a name or value or an extension's name in brackets, or a mark.
_TOKEN = re.compile(r"""#[^\n]*|"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+'|[\w.+-]+|\[[^\]\n]*\]|[{}<>]""")


def read_graph(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings of a directory's graph, and the names of its other options. Raises ConfigurationError."""
    file = directory / GRAPH_FILE
    if not file.is_file():
        return {}, []
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(_MOST_CHARACTERS + 1)
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"it has more than {_MOST_CHARACTERS} characters")
        return _settings(directory, _model_options(text))
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}; correct it, or remove it") from None


def _settings(directory: Path, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {}
    models = directory / str(options.pop("models_path", "."))
    if models.is_dir() and not models.samefile(directory):
        found["path"] = str(models.resolve())
    config = options.pop("plugin_config", "") or "{}"
    properties = json.loads(str(config))
    if not isinstance(properties, dict):
        raise ValueError(f"plugin_config must be a JSON object, got {config[:80]}")
    theirs = options.pop("target_device", "CPU" if properties else "")
    device = str(options.pop("device", theirs))
    if device == Device.NPU:
        found |= {SETTING_OF[name]: properties.pop(name) for name in SETTING_OF if name in properties}
    if device in set(Device):
        found["placements"] = [{"device": device, "plugin_config": properties} if properties else device]
    elif device:
        options |= {f"device {device}": "", **({"plugin_config": ""} if properties else {})}
    ours = {name: options.pop(name) for name in _OURS if name in options}
    return found | {_OURS[name]: value for name, value in ours.items()}, list(options)


def _model_options(text: str) -> dict[str, Any]:
    """The fields of the first message with a `models_path`, those of messages in it left empty; none without one."""
    open_messages: list[dict[str, Any]] = [{}]
    name: str | None = None
    for found in _TOKEN.finditer(text):
        part = found[0]
        if part.startswith("#"):
            continue
        if part in "{<":
            open_messages[-1][name or ""] = ""
            open_messages.append({})
            name = None
        elif part in "}>":
            message = open_messages.pop()
            if "models_path" in message:
                return message
            if not open_messages:
                raise ValueError("a message ends that did not begin")
            name = None
        elif name is None:
            name = part
        else:
            open_messages[-1][name] = _value(part)
            name = None
    if len(open_messages) > 1:
        raise ValueError("a message has no end")
    return open_messages[0] if "models_path" in open_messages[0] else {}


def _value(token: str) -> Any:
    if token[0] in "\"'":
        return str(ast.literal_eval(token))
    try:
        return token if token[0] == "[" else json.loads(token.lower())
    except ValueError:
        return token.lower() if token.isalpha() else token
