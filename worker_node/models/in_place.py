"""Directories that are served where they are (`path` in `[[models]]`); they themselves are never changed."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from worker_node.core.errors import ConfigurationError, ModelError
from worker_node.core.types import ModelKind, Progress
from worker_node.models.convert.job import recognised, special_file
from worker_node.models.directory import (
    MANIFEST_FILE,
    MODEL_FILE,
    InstalledModel,
    read_config,
    read_directory,
    read_facts,
)
from worker_node.models.prepare import PullSpec
from worker_node.models.sources.reference import LocalReference
from worker_node.models.sources.selection import SAFETENSORS_FILE, weight_files
from worker_node.models.store import ModelStore

# Raised when the same files would be prepared in another way.
_VERSION = 3
_LOGITS = re.compile(rb'names="[^"]*\blogits\b')
_SAFE = re.compile(r"[^a-z0-9._-]+")
_LABEL_LENGTH = 64


def open_directory(
    path: Path,
    name: str,
    prepared: Path,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    progress: Progress | None = None,
) -> InstalledModel:
    """Return the model of a directory anywhere on this machine, under `name`.

    What has to be made of an encoder is kept in a store of its own, `prepared`. `pooling` (mean, cls, last) and
    `normalize` count for encoders whose files do not specify them. Raises ConfigurationError, naming the file that is
    missing or cannot be used.
    """
    if not path.is_dir():
        raise ConfigurationError(f"{path} is not a directory")
    if (special := special_file(path)) is not None:
        raise ConfigurationError(f"{special} is a pipe, a socket or a device: a model's files are plain files")
    path = path.resolve()
    known = None if (path / MANIFEST_FILE).is_file() else recognised(path)
    if known is not None and (opened := known[1].open(path, name)) is not None:
        return opened
    if (path / MANIFEST_FILE).is_file() or (known is None and _generates(path)):
        found = replace(read_directory(path), id=name)
        if found.kind == ModelKind.EMBEDDING and (pooling, normalize) != (None, None):
            raise ConfigurationError(
                f"{path / MANIFEST_FILE}: the model has its own pooling; remove pooling and normalize"
            )
        return found
    if not (path / MODEL_FILE).is_file() and not weight_files(path) and known is None:
        raise ConfigurationError(
            f"{path}: holds neither {MODEL_FILE} nor {SAFETENSORS_FILE}; npu-node convert makes a model of a GGUF "
            "file, optimum-cli export openvino of other published models"
        )
    kind = ModelKind.EMBEDDING if known is None else known[0]
    identity = repr((_VERSION, str(path), kind, pooling, normalize, list(_stamps(path))))
    label = _SAFE.sub("-", name.lower()).strip("-._")[:_LABEL_LENGTH] or "model"
    model_id = f"{label}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    source = LocalReference(path)
    spec = PullSpec(source, model_id, kind=kind, pooling=pooling, normalize=normalize)
    try:
        prepared.mkdir(parents=True, exist_ok=True)
        store = ModelStore(prepared)
        made = store.pull(spec, progress)
        for old in prepared.glob(f"{label}-" + "[0-9a-f]" * 16):
            if old != made.path and source.alias in read_facts(old).aliases:
                store.remove(old.name)
    except ModelError as error:
        raise ConfigurationError(error.message) from error
    except OSError as error:
        raise ConfigurationError(f"{prepared} cannot be written ({error.strerror}); set compile_cache") from error
    return replace(made, id=name, source=f"directory {path}", aliases=())


def apparent_kind(directory: Path) -> str | None:
    """The kind of model that the small files of a directory show, whatever is wrong with the others; None: nothing."""
    if (kind := read_facts(directory).kind) is not None:
        return kind
    if (known := recognised(directory)) is not None:
        return known[0]
    with contextlib.suppress(ConfigurationError, OSError):
        names = _architectures(directory)
        if any(name.endswith("ForCausalLM") for name in names):
            return ModelKind.GENERATION
        if any(name.endswith("Model") for name in names):
            return ModelKind.EMBEDDING
    made_for = {"generation_config.json": ModelKind.GENERATION, "modules.json": ModelKind.EMBEDDING}
    return next((kind for name, kind in made_for.items() if (directory / name).is_file()), None)


def _generates(path: Path) -> bool:
    """Whether it is an OpenVINO model that ends in the probabilities of tokens."""
    graph = path / MODEL_FILE
    if not graph.is_file() or _LOGITS.search(graph.read_bytes()) is None:
        return False
    names = _architectures(path)
    if any(name.endswith("Classification") for name in names):
        raise ConfigurationError(
            f"{path}: {', '.join(names)} classifies texts; only embedding and generation are served"
        )
    return True


def _architectures(directory: Path) -> list[str]:
    return [str(name) for name in read_config(directory / "config.json").get("architectures") or ()]


def _stamps(path: Path) -> Iterator[tuple[str, int, int]]:
    """Names, sizes and times of the files that decide: hashing gigabytes at every start would take seconds."""
    for file in sorted((*path.glob("*.*"), *path.glob("*/config.json"))):
        if file.is_file():
            found = file.stat()
            yield str(file.relative_to(path)), found.st_size, found.st_mtime_ns
