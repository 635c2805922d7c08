"""The chat template of a model directory, by the order of the OpenVINO servers."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from worker_node.core.errors import ConfigurationError

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_GRAPH = "openvino_tokenizer.xml"
_FILES = ("chat_template.jinja", "template.jinja")
_IN_GRAPH = re.compile(r'<chat_template value="([^"]*)"')


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template in Jinja, and the file that holds it."""

    text: str
    file: Path


def find_template(directory: Path) -> ChatTemplate | None:
    """The template of `chat_template.jinja` or `template.jinja`, else `tokenizer_config.json`, else the tokenizer's.

    None where there is none, or only an empty one. Raises ConfigurationError, naming the file, for one that cannot be
    read.
    """
    for name in _FILES:
        if (file := directory / name).is_file() and (text := _text(file)).strip():
            return ChatTemplate(text, file)
    if (file := directory / TOKENIZER_CONFIG).is_file() and (text := _of_config(read_config(file), file)):
        return ChatTemplate(text, file)
    if (file := directory / TOKENIZER_GRAPH).is_file() and (found := _IN_GRAPH.search(_text(file))):
        return ChatTemplate(html.unescape(found[1]), file)
    return None


def read_config(path: Path) -> dict[str, Any]:
    """A JSON file of a model directory; raises ConfigurationError, naming the file, when it is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path}: not readable ({error})") from error


def _of_config(config: dict[str, Any], file: Path) -> str:
    """`chat_template` is one template, or a list of named ones of which `default` counts."""
    match config.get("chat_template"):
        case None:
            return ""
        case str(text):
            return text
        case [*named] if all(isinstance(item, dict) for item in named):
            texts = {item.get("name"): item.get("template") for item in named}
            if isinstance(default := texts.get("default"), str):
                return default
    raise ConfigurationError(f'{file}: chat_template is neither a text nor a list with one that is named "default"')


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: not readable ({error})") from error
