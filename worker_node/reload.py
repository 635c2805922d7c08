"""Applies changed settings while the node runs: the new file is validated as a whole, then applied model by model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from worker_node.errors import ConfigurationError
from worker_node.manager.failed import FailedModel
from worker_node.manager.manager import ModelManager
from worker_node.manager.served import ServedModel
from worker_node.models.catalog import normalise_name
from worker_node.serving.memory import HOST
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.settings.reading import SettingsSource

log = logging.getLogger(__name__)

# Applied while the node runs; everything else needs a restart.
_APPLIED = frozenset({"models", "memory_budget"})
# What a model's engines do not know of.
_LIGHT = frozenset({"aliases", "idle_unload_s"})
_LOOK_S = 1.0

Build = Callable[[ModelSettings], ServedModel | FailedModel]


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """What a reload changes. `restart` names settings that differ from the running ones and need a restart."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    applied: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)


class Reloader:
    """Reloads the settings of one node from `source`; `build` makes a model by its settings.

    Raises ConfigurationError, with file and line, for settings that are wrong; nothing is applied then.
    """

    def __init__(self, source: SettingsSource, settings: NodeSettings, manager: ModelManager, build: Build) -> None:
        self._source = source
        self._settings = settings
        self._manager = manager
        self._build = build
        self._one = asyncio.Lock()

    async def reload(self) -> ReloadReport:
        """Read the settings and apply them; returns when every model has been changed over."""
        async with self._one:
            # Once begun it is not left half applied, whoever stops waiting for it.
            return await asyncio.shield(asyncio.ensure_future(self._reload()))

    async def _reload(self) -> ReloadReport:
        new, old = await asyncio.to_thread(self._source.read), self._settings
        before = {normalise_name(model.name): model for model in old.models}
        after = {normalise_name(model.name): model for model in new.models}
        changed = [name for name in after if name in before and not _same(after[name], before[name])]
        failed = {normalise_name(model.name) for model in self._manager.failed}
        to_build = [name for name in after if name not in before or name in changed or name in failed]
        built = {name: await asyncio.to_thread(self._sound, after[name]) for name in to_build}
        report = ReloadReport(
            added=tuple(after[name].name for name in after if name not in before),
            removed=tuple(before[name].name for name in before if name not in after),
            changed=tuple(after[name].name for name in changed),
            applied=("memory_budget",) if new.memory_budget != old.memory_budget else (),
            restart=tuple(
                name
                for name in type(new).model_fields
                if name not in _APPLIED and getattr(new, name) != getattr(old, name)
            ),
        )
        await self._apply(before, after, built, report)
        if report.applied and new.memory_budget is not None:
            self._manager.set_budget(HOST, new.memory_budget)
        self._settings = old.model_copy(update={name: getattr(new, name) for name in _APPLIED})
        log.info("settings reloaded: %s", report)
        return report

    def _sound(self, wanted: ModelSettings) -> ServedModel:
        model = self._build(wanted)
        if isinstance(model, FailedModel):
            raise ConfigurationError(model.reason)
        return model

    async def _apply(
        self,
        before: dict[str, ModelSettings],
        after: dict[str, ModelSettings],
        built: dict[str, ServedModel],
        report: ReloadReport,
    ) -> None:
        manager = self._manager
        served = {normalise_name(model.id): model for model in manager.models}
        for name in before.keys() - after.keys():
            manager.drop_failed(before[name].name)
            if name in served:
                manager.turnover.retire_later(served[name])
        for name, model in built.items():
            manager.drop_failed(after[name].name)
            old = served.get(name)
            if old is None:
                manager.add(model)
            elif name in before and _light(before[name], after[name]):
                manager.relabel(old, model)
            elif (problem := await manager.turnover.replace(old, model)) is not None:
                report.problems.append(problem)
                log.error("%s", problem)
        manager.arrange([model.name for model in after.values()])


def _light(before: ModelSettings, after: ModelSettings) -> bool:
    """Whether only such settings differ as the engines do not know of."""
    return _same(before, after.model_copy(update={name: getattr(before, name) for name in _LIGHT}))


def _same(before: ModelSettings, after: ModelSettings) -> bool:
    """Whether the values are equal, wherever in the file they stand."""
    return before.model_dump() == after.model_dump()


async def watch_file(path: Path, reloader: Reloader) -> None:
    """Reload when the file has changed and is no longer being written, until cancelled."""
    known = seen = _stamp(path)
    while True:
        await asyncio.sleep(_LOOK_S)
        now = _stamp(path)
        if now == seen and now != known and now is not None:
            known = now
            await reload_and_log(reloader)
        seen = now


async def reload_and_log(reloader: Reloader) -> None:
    """Reload; what is wrong with the settings is logged, and the node goes on with the earlier ones."""
    try:
        await reloader.reload()
    except ConfigurationError as error:
        log.error("the settings were not reloaded, the node goes on with the earlier ones: %s", error.message)
    except Exception:
        log.exception("the settings could not be reloaded; the node goes on with the earlier ones")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
