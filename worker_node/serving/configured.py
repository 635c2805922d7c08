"""The models that the settings name. One whose files are damaged becomes a `FailedModel`, and the others serve."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

from worker_node.core.errors import ConfigurationError, ModelNotFound
from worker_node.manager.served import FailedModel, ServedModel
from worker_node.models.catalog import normalise_name
from worker_node.models.in_place import apparent_kind
from worker_node.models.manifest import check_weights
from worker_node.models.store import ModelStore
from worker_node.serving.build import build_model
from worker_node.serving.installed import installed_model
from worker_node.serving.machine import Machine
from worker_node.settings import ModelSettings
from worker_node.settings.declaration import VectorOptions, declarations, options_of

log = logging.getLogger(__name__)


def configured_models(machine: Machine) -> list[ServedModel | FailedModel]:
    """All models that the settings name. Raises ConfigurationError for a wrong setting, or if none is installed."""
    models = [configured_model(wanted, machine) for wanted in machine.settings.models]
    failed = [model for model in models if isinstance(model, FailedModel)]
    if failed and len(failed) == len(models) and not any(model.installed for model in failed):
        raise ConfigurationError("\n".join(model.reason for model in failed))
    for model in failed:
        log.error("model %s cannot be served: %s", model.name, model.reason)
    return models


def configured_model(wanted: ModelSettings, machine: Machine) -> ServedModel | FailedModel:
    """One of them. Raises ConfigurationError when a setting is wrong; damaged and missing files make a FailedModel."""
    try:
        return _build(wanted, machine)
    except _Damaged as damage:
        return _failed(wanted, machine, damage.message, _kind(wanted, machine), installed=damage.installed)


class _Damaged(ConfigurationError):
    """The model's files are missing or damaged; `installed`: some are there."""

    def __init__(self, reason: str, *, installed: bool = True) -> None:
        super().__init__(reason)
        self.installed = installed


def _failed(
    wanted: ModelSettings, machine: Machine, reason: str, kind: str | None, *, installed: bool = True
) -> FailedModel:
    entry = ModelStore(machine.settings.model_store).catalog.find(wanted.name) if wanted.path is None else None
    names = [*wanted.aliases, *((entry.id, *entry.aliases) if entry is not None else ())]
    aliases = [name for name in names if normalise_name(name) != normalise_name(wanted.name)]
    return FailedModel(wanted.name, reason, lambda: _build(wanted, machine), aliases, kind, installed=installed)


def _build(wanted: ModelSettings, machine: Machine) -> ServedModel:
    if wanted.path is None and wanted.of(VectorOptions) != VectorOptions():
        installed_model(wanted, ModelStore(machine.settings.model_store), machine.settings)
    try:
        installed = installed_model(wanted, ModelStore(machine.settings.model_store), machine.settings)
        check_weights(installed.path)
    except ConfigurationError as error:
        raise _Damaged(error.message, installed=not isinstance(error.__cause__, ModelNotFound)) from error
    try:
        model = build_model(installed, wanted, machine)
    except ConfigurationError:
        raise
    except Exception as error:  # tokenizers and OpenVINO raise types of their own for damaged files
        raise _Damaged(
            f"{installed.path}: its files are damaged ({type(error).__name__}: {_brief(error)}); pull or copy it again"
        ) from error
    return replace(model, without_files=lambda reason: _failed(wanted, machine, reason, installed.kind))


def _kind(wanted: ModelSettings, machine: Machine) -> str | None:
    """What kind of model the settings mean, by what can be read: its files, the catalog, the options that it has."""
    store = ModelStore(machine.settings.model_store)
    with contextlib.suppress(ModelNotFound, OSError):
        directory = store.locate(wanted.name) if wanted.path is None else wanted.path.expanduser()
        if (kind := apparent_kind(directory)) is not None:
            return kind
    if wanted.path is None and (entry := store.catalog.find(wanted.name)) is not None:
        return entry.kind
    owners = [{owner.task for owner in declarations() if name in options_of(owner)} for name in wanted.options]
    common = set.intersection(*owners) if owners else set()
    return common.pop() if len(common) == 1 else None


def _brief(error: Exception) -> str:
    return " | ".join(line.strip() for line in str(error).splitlines() if line.strip())[:300]
