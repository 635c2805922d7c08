"""The chat template of a model directory, by the order of the OpenVINO servers."""

from __future__ import annotations

import hashlib
import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import ModelKind
from worker_node.models.manifest import MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE, InstalledModel, read_model, sizes
from worker_node.models.sources.disk import storage_problem

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


# The sampling that a model's maker recommends: `generation_config.json`.

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


# Model directories that carry no manifest: OpenVINO models as their makers publish or export them.

GENERATION_FILES = (
    MODEL_FILE,
    WEIGHTS_FILE,
    "openvino_tokenizer.xml",
    "openvino_tokenizer.bin",
    "openvino_detokenizer.xml",
    "openvino_detokenizer.bin",
)

# Optional, but a damaged one would only be found by an engine that cannot load.
_OTHER_CONFIGS = (TOKENIZER_CONFIG, GENERATION_CONFIG)

# The form of the weights, as nncf and the compression of this project note it in the graph.
_COMPRESSION = re.compile(r'<weight_compression>.*?<mode value="(\w+)"', re.DOTALL)
_TAIL_BYTES = 1 << 16


def has_manifest(path: Path) -> bool:
    """Whether a directory has a manifest. Raises ConfigurationError where this user may not look into it."""
    try:
        return (path / MANIFEST_FILE).exists()
    except OSError as error:
        raise ConfigurationError(storage_problem(error) or f"{path}: not readable ({error})") from error


def read_directory(path: Path) -> InstalledModel:
    """Read a model directory anywhere on this machine, with a manifest or, for a generation model, without.

    Without a manifest the facts come from `config.json`, and there is no canary.
    Raises ConfigurationError, naming what is missing or damaged.
    """
    if has_manifest(path):
        return read_model(path)
    missing = [name for name in GENERATION_FILES if not (path / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"{path}: not a model directory that can be loaded; missing: {', '.join([MANIFEST_FILE, *missing])} "
            "(npu-node convert makes one of GGUF, safetensors and OpenVINO files)"
        )
    try:
        return _without_manifest(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not readable ({error})") from error


def _without_manifest(path: Path) -> InstalledModel:
    config = read_config(path / "config.json")
    for name in _OTHER_CONFIGS:
        if (path / name).is_file():
            read_config(path / name)
    template = find_template(path)
    files = sizes(path)
    return InstalledModel(
        id=path.resolve().name.lower(),
        kind=ModelKind.GENERATION,
        path=path,
        context_limit=context_limit(config, path),
        quantization=compression_of(path / MODEL_FILE),
        family=family_of(str(config.get("model_type", "")), template.text if template else ""),
        source=f"directory {path}",
        files=files,
        # Of names, sizes and times: hashing gigabytes of weights at every look would take seconds.
        digest=hashlib.sha256(
            repr((sorted(files.items()), (path / MODEL_FILE).stat().st_mtime_ns)).encode()
        ).hexdigest(),
        installed_at=(path / MODEL_FILE).stat().st_mtime,
    )


def context_limit(config: dict[str, Any], path: Path) -> int:
    """Tokens that the model was made for; raises ConfigurationError when `config.json` does not say."""
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int) or limit < 1:
        raise ConfigurationError(f"{path / 'config.json'}: max_position_embeddings is missing or no whole number")
    return limit


def family_of(model_type: str, template: str) -> str:
    """The chat and tool-call format: by the marks in the template, else the architecture's own name."""
    if "<|start_header_id|>" in template:
        return "llama3"
    if "<|im_start|>" in template:
        return "qwen" if model_type.startswith("qwen") else "chatml"
    return "phi" if model_type.startswith("phi") else model_type or "base"


def compression_of(graph: Path) -> str:
    """The form of the weights, as it is noted at the end of the graph; `unknown` where it is not."""
    with graph.open("rb") as stream:
        stream.seek(max(0, graph.stat().st_size - _TAIL_BYTES))
        tail = stream.read().decode(errors="replace")
    match = _COMPRESSION.search(tail)
    return match[1] if match else "unknown"
