"""Model directories that carry no manifest: OpenVINO models as their makers publish or export them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import ModelKind
from worker_node.models.chat_template import TOKENIZER_CONFIG, find_template, read_config
from worker_node.models.generation_defaults import GENERATION_CONFIG
from worker_node.models.manifest import MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE, InstalledModel, read_model, sizes
from worker_node.models.sources.disk import storage_problem

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
