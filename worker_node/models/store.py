"""The models on this machine: `<root>/<id>/`, each complete or not there at all."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from worker_node.domain import ModelKind
from worker_node.errors import ConfigurationError, ConversionFailed, ModelNotFound
from worker_node.models import staging
from worker_node.models.catalog import Catalog, CatalogEntry, Quantization, SourceFormat, normalise_name
from worker_node.models.directory import read_directory
from worker_node.models.manifest import MANIFEST_FILE, MODEL_FILE, InstalledModel
from worker_node.models.preparation import prepare_entry, prepare_local
from worker_node.models.progress import Progress, Silent

__all__ = ["InstalledModel", "ModelStore", "default_store_root"]

log = logging.getLogger(__name__)

STORE_VARIABLE = "NPU_NODE_MODEL_STORE"

_ID = re.compile(r"[a-z0-9][a-z0-9._-]*")


def default_store_root() -> Path:
    """`$NPU_NODE_MODEL_STORE`, else `npu-node/models` in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    if root := os.environ.get(STORE_VARIABLE):
        return Path(root).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "npu-node" / "models"


class ModelStore:
    """Finds, makes and removes models under one root; several processes may use it at once."""

    def __init__(self, root: Path | None = None, catalog: Catalog | None = None) -> None:
        self.root = default_store_root() if root is None else root
        self.catalog = Catalog.load() if catalog is None else catalog

    def directories(self) -> list[Path]:
        """Every directory that is, or claims to be, a model of this store."""
        found = [*self.root.glob(f"*/{MANIFEST_FILE}"), *self.root.glob(f"*/{MODEL_FILE}")]
        return sorted({path.parent for path in found if not path.parent.name.startswith(".")})

    def installed(self) -> list[InstalledModel]:
        """Every model that is ready to load, by id; damaged ones are left out and logged."""
        models: list[InstalledModel] = []
        for path in self.directories():
            try:
                models.append(read_directory(path))
            except ConfigurationError as error:
                log.warning("a model is left out: %s", error.message)
        return models

    def locate(self, name: str) -> Path:
        """The directory of the installed model of that id or alias, damaged or not. Raises ModelNotFound."""
        directory = self._directory(name)
        if directory is None:
            raise ModelNotFound(f"model {name!r} is not installed", param="model")
        return directory

    def get(self, name: str) -> InstalledModel:
        """The installed model of that id or alias.

        Raises ModelNotFound when it is not installed, ConfigurationError when its directory is damaged.
        """
        directory = self._directory(name)
        if directory is not None:
            return read_directory(directory)
        if (entry := self.catalog.find(name)) is not None:
            raise ModelNotFound(
                f"model {entry.id} is not installed; get it with: npu-node pull {entry.id}", param="model"
            )
        here = ", ".join(path.name for path in self.directories()) or "none"
        raise ModelNotFound(f"model {name!r} is not known; installed models: {here}", param="model")

    def pull(
        self, name: str, progress: Progress | None = None, *, quantization: Quantization | None = None
    ) -> InstalledModel:
        """Download, verify and convert a model of the catalog; does nothing when it is installed.

        With a `quantization` other than the catalog's the model is installed beside the usual one, as `<id>-<form>`.
        Raises ModelNotFound, or a ModelError when any step fails; the store is then as it was.
        """
        entry = self.catalog.resolve(name)
        if quantization in (None, entry.quantization):
            return self._install(entry.id, progress, lambda work, p: prepare_entry(entry, entry.id, None, work, p))
        self._check_choice(entry)
        model_id = f"{entry.id}-{quantization}"
        return self._install(model_id, progress, lambda work, p: prepare_entry(entry, model_id, quantization, work, p))

    def convert(
        self,
        source: Path,
        name: str | None = None,
        progress: Progress | None = None,
        *,
        kind: ModelKind | None = None,
        quantization: Quantization | None = None,
    ) -> InstalledModel:
        """Convert local files and install them as `name` (default: the file's or directory's own).

        `source` is a GGUF file, or a directory of safetensors or OpenVINO files; it is left as it is.
        Raises ConversionFailed when it is neither, the name is taken or belongs to the catalog, or a step fails.
        """
        model_id = normalise_name(name if name is not None else source.resolve().name.removesuffix(".gguf"))
        if _ID.fullmatch(model_id) is None:
            raise ConversionFailed(
                f"{model_id!r} cannot be a model's name: letters, digits, dots, - and _ can; use --name"
            )
        if self.catalog.find(model_id) is not None:
            raise ConversionFailed(f"the name {model_id} belongs to a model of the catalog; choose another with --name")
        if (self.root / model_id).exists():
            raise ConversionFailed(f"{self.root / model_id} exists; choose another name with --name, or remove it")
        return self._install(
            model_id, progress, lambda work, p: prepare_local(source, model_id, kind, quantization, work, p)
        )

    def remove(self, name: str) -> None:
        """Remove an installed model; raises ModelNotFound when there is none of that name."""
        directory = self.locate(name)
        with staging.exclusive(self.root, directory.name):
            if directory.is_dir():
                staging.discard(directory, directory.name)

    def sweep(self) -> list[Path]:
        """Remove what pulls that were killed left behind; returns what it was."""
        return staging.sweep(self.root)

    def _directory(self, name: str) -> Path | None:
        entry = self.catalog.find(name)
        wanted = {normalise_name(name), entry.id if entry else normalise_name(name)}
        return next((path for path in self.directories() if path.name.lower() in wanted), None)

    @staticmethod
    def _check_choice(entry: CatalogEntry) -> None:
        if entry.format is not SourceFormat.GGUF:
            raise ConversionFailed(f"{entry.id} comes as {entry.quantization}; only GGUF models leave a choice")

    def _install(
        self, model_id: str, progress: Progress | None, prepare: Callable[[Path, Progress], Path]
    ) -> InstalledModel:
        target = self.root / model_id
        if (target / MANIFEST_FILE).exists():
            return read_directory(target)
        progress = progress or Silent()
        self.root.mkdir(parents=True, exist_ok=True)
        self.sweep()
        with staging.exclusive(self.root, model_id, on_wait=lambda: progress.stage("waiting for another process")):
            if (target / MANIFEST_FILE).exists():
                return read_directory(target)
            if target.exists():
                raise ConfigurationError(f"{target} exists but is no model of this store; move it away and pull again")
            work = staging.partial(self.root, model_id)
            try:
                staging.publish(prepare(work, progress), target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        return read_directory(target)
