"""Finds the model that a table `[[models]]` names: in the store, or in a directory of its own."""

from __future__ import annotations

import shlex
from pathlib import Path

from worker_node.core.errors import ConfigurationError, ModelNotFound
from worker_node.models.in_place import open_directory
from worker_node.models.manifest import InstalledModel
from worker_node.models.store import ModelStore
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.settings.declaration import VectorOptions

PREPARED = "prepared"


def installed_model(wanted: ModelSettings, store: ModelStore, settings: NodeSettings) -> InstalledModel:
    """Find the model; what must be made of a directory with an encoder is made now, which takes seconds.

    Raises ConfigurationError, with the place of the setting, when there is no such model or its files are damaged.
    """
    vectors = wanted.of(VectorOptions)
    if wanted.path is not None:
        cache = (wanted.compile_cache or settings.compile_cache).expanduser()
        try:
            return open_directory(
                wanted.path.expanduser(),
                wanted.name,
                cache / PREPARED,
                pooling=vectors.pooling,
                normalize=vectors.normalize,
            )
        except ConfigurationError as error:
            raise wanted.error("path", error.message) from error
    if vectors != VectorOptions():
        raise wanted.error("pooling", "pooling and normalize need a path; an installed model has its own")
    try:
        return store.get(wanted.name)
    except ModelNotFound as error:
        raise wanted.error("name", f"it {not_installed(wanted.name, settings.model_store)}") from error


def not_installed(name: str, store: Path) -> str:
    """The message for a model that is missing, with the command that installs it into the right store."""
    return f"is not installed in {store}; run: npu-node pull {name} --model-store {shlex.quote(str(store))}"
