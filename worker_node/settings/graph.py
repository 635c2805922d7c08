"""`graph.pbtxt` of an OpenVINO Model Server installation, as keys of `[[models]]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device
from worker_node.settings.model import SETTING_OF

GRAPH_FILE = "graph.pbtxt"
_MOST_CHARACTERS, _MOST_LEVELS = 1 << 16, 20
_OURS: Mapping[str, str] = {
    "best_of_limit": "best_of_limit",
    "cache_size": "cache_size_gb",
    "enable_prefix_caching": "enable_prefix_caching",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_tokens_limit": "max_tokens_limit",
    "normalize_embeddings": "normalize",
    "pooling": "pooling",
}
_BLANK = re.compile(r"(?:\s++|#[^\n]*+)*+")
# A text, a name or an extension's name in brackets, or a mark.
_TOKEN = re.compile(r"""("(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+')|([\w.+-]+|\[[^\]\n]*\])|[{}<>:;,]""")


def read_graph(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings of the directory's graph, and its options that have no counterpart here; none without the file.

    Raises ConfigurationError for a file that is damaged.
    """
    file = directory / GRAPH_FILE
    if not file.is_file():
        return {}, []
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(_MOST_CHARACTERS + 1)
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"it has more than {_MOST_CHARACTERS} characters")
        return _settings(directory, _model_options(_message(_tokens(text), "", 0)))
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


def _tokens(text: str) -> Iterator[str]:
    at = _BLANK.match(text, 0).end()  # type: ignore[union-attr]
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"line {text.count(chr(10), 0, at) + 1} is not text protobuf")
        yield token[0]
        at = _BLANK.match(text, token.end()).end()  # type: ignore[union-attr]


def _message(tokens: Iterator[str], end: str, level: int) -> dict[str, Any]:
    """The fields of a message up to the mark `end`: lists of messages, and the last value of others."""
    found: dict[str, Any] = {}
    for name in tokens:
        if name in {",", ";"}:
            continue
        if name == end:
            return found
        value = next(tokens, "") if name[0] not in "\"'{}<>:" else ""
        value = next(tokens, "") if value == ":" else value
        if level > _MOST_LEVELS or value in {"", "}", ">", ":", ",", ";"}:
            raise ValueError(f"{name[:80]} must be a field with a value")
        if value in {"{", "<"}:
            earlier = found.get(name)
            inner = _message(tokens, {"{": "}", "<": ">"}[value], level + 1)
            found[name] = [*(earlier if isinstance(earlier, list) else []), inner]
        else:
            found[name] = _value(value)
    if end:
        raise ValueError(f"it ends before a {end}")
    return found


def _value(token: str) -> Any:
    if token[0] in "\"'":
        return str(ast.literal_eval(token))
    try:
        return token if token[0] == "[" else json.loads(token.lower())
    except ValueError:
        return token.lower() if token.isalpha() else token


def _model_options(message: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the first calculator that has a model; none where there is no such."""
    if "models_path" in message:
        return dict(message)
    inner = [each for value in message.values() if isinstance(value, list) for each in value]
    return next((found for each in inner if (found := _model_options(each))), {})
