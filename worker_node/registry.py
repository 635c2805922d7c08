"""The tasks that this node can serve: one registration each, found without a list of them.

A task is a package. Its module `task` holds `TASK`, a `Task`, which names the parts that the layers of the node need.
They are imported only where they are needed, so that an engine process imports no HTTP and `npu-node list` no OpenVINO.
The node's own tasks are the packages in `worker_node/tasks`; others are installed beside the node and declare an entry
point in the group `npu_node.tasks` (CONTRIBUTING.md, "Adding a task").
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from worker_node.core.errors import ConfigurationError

GROUP = "npu_node.tasks"
_OWN = "worker_node.tasks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task. Parts are named as "module:object".

    `kind` is what manifests, settings, metrics and /health call its models; `verb` is the task of `GET /models`, and
    `capability` what the models can do there before they are loaded. `options` are the modules that declare the options
    of its engines and models (`engines.options`). `serving` is a `serving.task.ServedTask`: how a model is built,
    planned and admitted. `api` is an `http.routes.TaskApi`: its routes. `files` is a `models.convert.job.ModelFiles`:
    which published files are such a model, and what is made of them. `listed` is what lists of models say that it can
    do, in the words of Ollama's API; by default the capability.
    """

    kind: str
    verb: str
    capability: str
    serving: str
    options: tuple[str, ...] = ()
    api: str | None = None
    files: str | None = None
    listed: tuple[str, ...] = ()


@functools.cache
def tasks() -> Mapping[str, Task]:
    """All tasks by kind, the node's own first. Raises ConfigurationError for one that cannot be registered."""
    found: dict[str, Task] = {}
    for origin, task in _registrations():
        if not isinstance(task, Task):
            raise ConfigurationError(f"{origin} is registered as a task but is not a worker_node.registry.Task")
        if task.kind in found:
            raise ConfigurationError(f"{origin}: another task serves {task.kind} models already; uninstall one of them")
        found[task.kind] = task
    return MappingProxyType(found)


def task_of(kind: str) -> Task:
    """The task for a kind of model. Raises ConfigurationError when none serves it."""
    try:
        return tasks()[kind]
    except KeyError:
        raise ConfigurationError(
            f"no task of this node serves {kind} models; it has tasks for {', '.join(tasks())}"
        ) from None


@functools.cache
def import_options() -> None:
    """Import the modules that declare options, of every task."""
    for task in tasks().values():
        for module in task.options:
            importlib.import_module(module)


def load(reference: str) -> Any:
    """The object that "module:object" names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _registrations() -> Iterator[tuple[str, object]]:
    # Slow to import, and an engine process, which knows its own task, never asks.
    import pkgutil  # noqa: PLC0415
    from importlib import metadata  # noqa: PLC0415

    for package in sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(_OWN).__path__)):
        yield f"{_OWN}.{package}", load(f"{_OWN}.{package}.task:TASK")
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            yield f"entry point {entry.name} ({entry.value})", entry.load()
        except Exception as error:
            raise ConfigurationError(
                f"the task {entry.name} ({entry.value}) cannot be imported ({type(error).__name__}: {error}); "
                "repair or uninstall the package that brings it"
            ) from error
