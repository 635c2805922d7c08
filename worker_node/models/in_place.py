"""Model directories that are served where they are, with or without a manifest of ours; nothing is written to them.

A generation model in OpenVINO form is loaded from its directory. An encoder needs a graph that ends in one vector for
each text, with its canary and the name of its space: these are made once, in a directory of their own, and made again
when the files or the options change.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from worker_node.core.errors import ConfigurationError, ModelError
from worker_node.core.types import ModelKind
from worker_node.models import store
from worker_node.models.catalog import SourceFormat
from worker_node.models.convert.job import ConversionJob
from worker_node.models.directory import read_config, read_directory
from worker_node.models.files import recognised, special_file
from worker_node.models.manifest import MANIFEST_FILE, MODEL_FILE, InstalledModel, read_facts, read_model
from worker_node.models.prepare import convert
from worker_node.models.progress import Progress, Silent
from worker_node.models.sources.selection import SAFETENSORS_FILE

log = logging.getLogger(__name__)

# Raised when the same files would be prepared in another way.
_VERSION = 2
_LOGITS = re.compile(rb'names="[^"]*\blogits\b')
_SAFE = re.compile(r"[^a-z0-9._-]+")


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

    What has to be made of an encoder is kept below `prepared`. `pooling` (mean, cls, last) and `normalize` count for
    encoders whose files do not specify them. Raises ConfigurationError, naming the file that is missing or cannot be
    used.
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
    if not any((path / file).is_file() for file in (MODEL_FILE, SAFETENSORS_FILE)) and known is None:
        raise ConfigurationError(
            f"{path}: holds neither {MODEL_FILE} nor {SAFETENSORS_FILE}; npu-node convert makes a model of a GGUF "
            "file, optimum-cli export openvino of other published models"
        )
    try:
        kind = None if known is None else known[0]
        made = _prepare(path, name, prepared, kind, pooling, normalize, progress or Silent())
    except ModelError as error:
        raise ConfigurationError(error.message) from error
    except OSError as error:
        raise ConfigurationError(f"{prepared} cannot be written ({error.strerror}); set compile_cache") from error
    return replace(read_model(made), id=name, source=f"directory {path}")


def apparent_kind(directory: Path) -> str | None:
    """The kind of model that the small files of a directory show, whatever is wrong with the others; None: nothing."""
    if (kind := read_facts(directory).kind) is not None:
        return kind
    if (known := recognised(directory)) is not None:
        return known[0]
    with contextlib.suppress(ConfigurationError, OSError):
        names = [str(name) for name in read_config(directory / "config.json").get("architectures") or ()]
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
    config: dict[str, Any] = read_config(path / "config.json")
    names = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith("Classification") for name in names):
        raise ConfigurationError(
            f"{path}: {', '.join(names)} classifies texts; only embedding and generation are served"
        )
    return True


def _prepare(
    path: Path,
    name: str,
    root: Path,
    kind: str | None,
    pooling: str | None,
    normalize: bool | None,
    progress: Progress,
) -> Path:
    """The directory of what is made of an encoder, or of files of `kind`: the one that is there, or a new one."""
    identity = repr((_VERSION, str(path), kind, pooling, normalize, list(_stamps(path))))
    label = _SAFE.sub("-", name.lower()).strip("-.") or "model"
    target = root / f"{label}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    root.mkdir(parents=True, exist_ok=True)
    with store.exclusive(root, label):
        if not (target / MANIFEST_FILE).is_file():
            log.info("model %s: preparing what is in %s", name, path)
            work = store.partial(root, label)
            try:
                store.publish(_converted(path, name, kind, pooling, normalize, work, progress), target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        for old in root.glob(f"{label}-" + "[0-9a-f]" * 16):
            if old != target and _made_of(old) == f"directory {path}":
                shutil.rmtree(old, ignore_errors=True)
    return target


def _made_of(directory: Path) -> str | None:
    """The source of a prepared directory; None for one that is not complete."""
    try:
        return read_model(directory).source
    except ConfigurationError:
        return None


def _stamps(path: Path) -> Iterator[tuple[str, int, int]]:
    """Names, sizes and times of the files that decide: hashing gigabytes at every start would take seconds."""
    for file in sorted((*path.glob("*.*"), *path.glob("*/config.json"))):
        if file.is_file():
            found = file.stat()
            yield str(file.relative_to(path)), found.st_size, found.st_mtime_ns


def _converted(
    path: Path,
    name: str,
    kind: str | None,
    pooling: str | None,
    normalize: bool | None,
    work: Path,
    progress: Progress,
) -> Path:
    target, scratch = work / "model", work / "scratch"
    target.mkdir()
    scratch.mkdir()
    form = SourceFormat.OPENVINO if (path / MODEL_FILE).is_file() else SourceFormat.SAFETENSORS
    job = ConversionJob(
        source=str(path),
        target=str(target),
        scratch=str(scratch),
        id=name,
        format=form if kind is None else SourceFormat.TASK,
        licence="unknown",
        origin=f"directory {path}",
        source_sha256={},
        kind=kind or ModelKind.EMBEDDING,
        pooling=pooling,
        normalize=normalize,
    )
    convert(job, progress)
    return target
