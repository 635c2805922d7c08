"""The models that the settings name. One whose files are damaged becomes a `FailedModel`, and the others serve."""

from __future__ import annotations

import logging

from worker_node.errors import ConfigurationError, ModelNotFound
from worker_node.manager.failed import FailedModel
from worker_node.manager.served import ServedModel
from worker_node.models.store import ModelStore
from worker_node.models.weights import check_weights
from worker_node.options.pooling import VectorOptions
from worker_node.serving.build import build_model
from worker_node.serving.installed import installed_model
from worker_node.serving.machine import Machine
from worker_node.settings import ModelSettings

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
        return FailedModel(
            wanted.name, str(damage), lambda: _build(wanted, machine), wanted.aliases, installed=damage.installed
        )


class _Damaged(Exception):
    """The model's files are missing or damaged; `installed`: some are there."""

    def __init__(self, reason: str, *, installed: bool = True) -> None:
        super().__init__(reason)
        self.installed = installed


def _build(wanted: ModelSettings, machine: Machine) -> ServedModel:
    if wanted.path is None and wanted.of(VectorOptions) != VectorOptions():
        installed_model(wanted, ModelStore(machine.settings.model_store), machine.settings)
    try:
        installed = installed_model(wanted, ModelStore(machine.settings.model_store), machine.settings)
        check_weights(installed.path)
    except ConfigurationError as error:
        raise _Damaged(error.message, installed=not isinstance(error.__cause__, ModelNotFound)) from error
    try:
        return build_model(installed, wanted, machine)
    except ConfigurationError:
        raise
    except Exception as error:  # tokenizers and OpenVINO raise types of their own for damaged files
        raise _Damaged(
            f"{installed.path}: its files are damaged ({type(error).__name__}: {_brief(error)}); pull or copy it again"
        ) from error


def _brief(error: Exception) -> str:
    return " | ".join(line.strip() for line in str(error).splitlines() if line.strip())[:300]
