"""npu-proxy's environment and defaults in this node's words; translated when settings are read, weaker than our own.

Of the models only those that are served without any [[models]] are meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_node.core.types import Device, ModelKind
from worker_node.models.catalog import Catalog
from worker_node.models.directory import MODEL_FILE, has_manifest
from worker_node.models.store import apparent_kind, default_store_root

PREFIX = "NPU_PROXY_"
# What means the same in the same unit.
_SAME = {
    "HOST": "host",
    "PORT": "port",
    "TOKEN_LIMIT": "npu_token_limit",
    "COMPILE_CACHE_DIR": "compile_cache",
    "ALLOWED_HOSTS": "allowed_hosts",
    "INFERENCE_TIMEOUT": "request_timeout_s",
    "LOAD_TIMEOUT": "load_timeout_s",
    "EMBEDDING_CACHE_SIZE": "embedding_cache",
}
_DEVICES = ("DEVICE", "PREFERRED_DEVICE", "FALLBACK_DEVICE")
_MODELS = ("MODEL_PATH", "EMBEDDING_MODEL", "EMBEDDING_DEVICE", "MAX_PROMPT_LEN")
_MEANING = {
    **{name: f"NPU_NODE_{setting.upper()}" for name, setting in _SAME.items()},
    **dict.fromkeys(_DEVICES, "NPU_NODE_DEVICES"),
    "MODEL_PATH": "path of a [[models]] for each directory in it",
    "EMBEDDING_MODEL": "name of a [[models]]",
    "EMBEDDING_DEVICE": "placements of the embedding model in [[models]]",
    "MAX_PROMPT_LEN": "max_prompt_len of the models in [[models]] that generate",
    "LOG_LEVEL": "NPU_NODE_LOG_LEVEL",
}
_PROFILE = {"PORT": "11435", "EMBEDDING_DEVICE": "CPU", "MAX_PROMPT_LEN": "1800"}
_EMBEDDER, _GENERATOR, _PROXYS_EMBEDDER = "all-minilm-l6-v2", "smollm2-135m-instruct", "bge-small-en-v1.5"


def translated(
    environment: Mapping[str, str], *, profile: bool = False, store: Path | None = None
) -> dict[str, tuple[str, Any]]:
    """Variable and value by the name of the setting; empty values set nothing.

    With `profile` what is not set has npu-proxy's defaults, and its model of embeddings where `store` has that.
    """
    given = _given(environment)
    if profile:
        if has_manifest((store or default_store_root()) / _PROXYS_EMBEDDER):
            given.setdefault("EMBEDDING_MODEL", _PROXYS_EMBEDDER)
        given = _PROFILE | given
    found: dict[str, tuple[str, Any]] = {
        setting: (PREFIX + name, given[name]) for name, setting in _SAME.items() if name in given
    }
    if profile:
        found["npu_proxy_names"] = ("--profile", True)
    if (names := [name for name in _DEVICES if name in given]) and (devices := _devices(given)):
        found["devices"] = (PREFIX + names[0], devices)
    if names := [name for name in _MODELS if name in given]:
        found["models"] = (f"{PREFIX}{names[0]}", _models(given))
    return found


def notices(environment: Mapping[str, str]) -> list[str]:
    lines = []
    for name in sorted(_given(environment)):
        if name in _MEANING:
            lines.append(f"{PREFIX}{name} is npu-proxy's; here it is {_MEANING[name]}, which counts for more")
        else:
            why = "a node never makes answers up" if name == "REAL_INFERENCE" else "there is nothing like it here"
            lines.append(f"{PREFIX}{name} is npu-proxy's and has no effect: {why}")
    return lines


def _given(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(PREFIX): value for name, value in environment.items() if name.startswith(PREFIX) and value
    }


def _devices(given: Mapping[str, str]) -> list[str]:
    """The preferred device and the fallback; by default or with `auto` what comes after it: NPU, GPU, CPU."""
    order = [device.value for device in Device]
    first = given.get("DEVICE") or given.get("PREFERRED_DEVICE") or order[0]
    first = first.upper()
    fallback = given.get("FALLBACK_DEVICE", "auto").upper()
    if fallback != "AUTO":
        return list(dict.fromkeys((first, fallback)))
    return order[order.index(first) :] if first in order else [first]


def _models(given: Mapping[str, str]) -> list[dict[str, Any]]:
    """The models in MODEL_PATH, with the embedded one that writes where none of them does, and one that embeds."""
    length = {"max_prompt_len": given["MAX_PROMPT_LEN"]} if "MAX_PROMPT_LEN" in given else {}
    root = Path(given.get("MODEL_PATH", "/nonexistent")).expanduser()
    kinds = {path.parent: apparent_kind(path.parent) for path in sorted(root.glob(f"*/{MODEL_FILE}"))}
    found: list[dict[str, Any]] = [
        {"path": str(path), **(length if kind == ModelKind.GENERATION else {})} for path, kind in kinds.items()
    ]
    if ModelKind.GENERATION not in kinds.values():
        found.append({"name": _GENERATOR, **length})
    embedder: dict[str, Any] = {"name": given.get("EMBEDDING_MODEL", _EMBEDDER)}
    entry = Catalog.load().find(embedder["name"])
    names = {embedder["name"].rpartition("/")[2].lower(), *((entry.id,) if entry else ())}
    if device := given.get("EMBEDDING_DEVICE"):
        embedder["placements"] = [device.upper()]
    # The directory of that name is the one that is meant.
    same = next((model for model in found if Path(model.get("path", "")).name.lower() in names), None)
    if same is None:
        found.append(embedder)
    else:
        same |= {key: value for key, value in embedder.items() if key != "name"}
    return found
