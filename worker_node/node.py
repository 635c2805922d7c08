"""The running node: its settings, services and devices, and what changed settings do to it while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from worker_node.core.errors import ConfigurationError
from worker_node.devices.npu import NpuSource, Utilisation
from worker_node.devices.probe import Probe
from worker_node.manager.manager import ModelManager
from worker_node.manager.served import Activity, FailedModel, ServedModel
from worker_node.models.catalog import normalise_name
from worker_node.observability.metrics import Telemetry
from worker_node.serving.build import HOST
from worker_node.serving.run import Services
from worker_node.settings import ModelSettings, NodeSettings, is_loopback
from worker_node.settings.node import RELOADED
from worker_node.settings.reading import SettingsSource

log = logging.getLogger(__name__)

_APPLIED = frozenset(name for name, field in NodeSettings.model_fields.items() if RELOADED in field.metadata)
_LOOK_S = 1.0


class NodeState(Activity):
    """What changes while the node runs, and its inference requests. `started` is monotonic time."""

    def __init__(self, started: float) -> None:
        super().__init__()
        self.started = started
        self.draining = False
        # Held while a large reply is rendered: of many at once each turn of the event loop renders one part.
        self.rendering = asyncio.Lock()
        self.npu_utilisation = Utilisation()


@dataclass(slots=True)
class Node:
    """A running node, through which request handlers reach everything.

    `settings` are the current ones: a reload replaces them, and calls the `followers` with the new ones.
    """

    settings: NodeSettings
    services: Services
    probe: Probe
    npu: NpuSource
    state: NodeState = field(repr=False)
    reloader: Reloader | None = None
    followers: list[Callable[[NodeSettings], None]] = field(default_factory=list, repr=False)

    def adopt(self, settings: NodeSettings) -> None:
        """Replace the settings."""
        self.settings = settings
        for follow in self.followers:
            follow(settings)

    @property
    def manager(self) -> ModelManager:
        return self.services.manager

    @property
    def telemetry(self) -> Telemetry:
        return self.services.telemetry


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """What a reload changed: models by name, and the settings that were `applied`.

    `restart` names settings that differ from the running ones and need a restart.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    applied: tuple[str, ...]
    restart: tuple[str, ...]
    problems: list[str]


class Reloader:
    """Reads the settings of a running node again from `source`, and applies them model by model.

    `build` makes a model by its settings; `memory` is the bytes that models may take where `memory_budget` is not set.
    """

    def __init__(
        self,
        node: Node,
        source: SettingsSource,
        build: Callable[[ModelSettings], ServedModel | FailedModel],
        memory: int | None = None,
    ) -> None:
        self._node = node
        self._source = source
        self._build = build
        self._memory = memory
        self._one = asyncio.Lock()
        self._running: asyncio.Task[ReloadReport] | None = None

    async def reload(self) -> ReloadReport:
        """Read the settings and apply them; returns when every model has been changed over.

        Raises ConfigurationError, with file and line, for settings that are wrong; nothing is applied then.
        """
        await self._one.acquire()
        # Never left half applied, even if its caller stops waiting: the next one begins when it has ended.
        self._running = asyncio.create_task(self._reload(), name="reload")
        self._running.add_done_callback(lambda _: self._one.release())
        return await asyncio.shield(self._running)

    async def _reload(self) -> ReloadReport:
        new, old = await asyncio.to_thread(self._source.read), self._node.settings
        if old.from_file and not new.from_file:
            raise ConfigurationError(
                f"{self._source.config} sets nothing, and settings of the running node came from it: it may be in the "
                "middle of being written. Reload when it is complete; to go back to the defaults, restart the node"
            )
        merged = old.model_copy(update={name: getattr(new, name) for name in _APPLIED})
        # The new address is safe without keys, but the node listens at the old one until it is restarted.
        if not (merged.api_keys or merged.allow_unauthenticated or is_loopback(merged.host)):
            raise ConfigurationError(
                f"the node listens at {merged.host} until it is restarted, where it needs a key: to remove the keys "
                f"and bind {new.host}, restart it"
            )
        # By the names that requests find them by.
        before, after = ({normalise_name(model.name): model for model in settings.models} for settings in (old, new))
        report = _compare(old, new, before, after)
        failed = {normalise_name(model.name) for model in self._node.manager.failed}
        differing = {*report.added, *report.changed}
        to_build = [name for name, model in after.items() if model.name in differing or name in failed]
        built: dict[str, ServedModel] = {}
        for name in to_build:
            model = await asyncio.to_thread(self._build, after[name])
            if isinstance(model, ServedModel):
                built[name] = model
            elif after[name].name in differing:  # any other one has failed before
                raise ConfigurationError(model.reason)
        merged.note_file(given=new.from_file)
        self._node.adopt(merged)

        manager = self._node.manager
        served = {normalise_name(model.id): model for model in manager.models}
        for name in before.keys() - after.keys():
            manager.names.drop_failed(before[name].name)
            if name in served:
                manager.replacement.retire(served[name])
        # First: it decides which of the changed models can be loaded.
        if "memory_budget" in report.applied:
            manager.set_budget(HOST, new.memory_budget or self._memory)
        for name, replacement in built.items():
            manager.names.drop_failed(after[name].name)
            if name not in served:
                manager.add(replacement)
            elif (problem := await manager.replacement.replace(served[name], replacement)) is not None:
                report.problems.append(problem)
                log.error("%s", problem)
        manager.names.arrange([model.name for model in after.values()])
        log.info("settings reloaded: %s", report)
        if report.restart:
            log.warning("these settings have changed and need a restart of the node: %s", ", ".join(report.restart))
        return report


def _compare(
    old: NodeSettings, new: NodeSettings, before: Mapping[str, ModelSettings], after: Mapping[str, ModelSettings]
) -> ReloadReport:
    """The differences between the settings, and between their models, as the report of applying the new ones."""
    differing = [name for name in type(new).model_fields if getattr(new, name) != getattr(old, name)]
    return ReloadReport(
        added=tuple(model.name for name, model in after.items() if name not in before),
        removed=tuple(model.name for name, model in before.items() if name not in after),
        changed=tuple(model.name for name, model in after.items() if name in before and model != before[name]),
        applied=tuple(name for name in differing if name in _APPLIED and name != "models"),
        restart=tuple(name for name in differing if name not in _APPLIED),
        problems=[],
    )


async def follow_changes(path: Path | None, reloader: Reloader, hangup: asyncio.Event) -> None:
    """Reload when `hangup` is set, and when the file has changed and is no longer being written, until cancelled.

    What is wrong with the settings is logged, and the node goes on with the earlier ones.
    """
    known = seen = _stamp(path)
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hangup.wait(), _LOOK_S)
        now = _stamp(path)
        if hangup.is_set() or (now == seen and now != known and now is not None):
            hangup.clear()
            try:
                await reloader.reload()
            except ConfigurationError as error:
                log.error("the settings were not reloaded, the node goes on with the earlier ones: %s", error.message)
            except Exception:
                log.exception("the settings could not be reloaded; the node goes on with the earlier ones")
            known = now
        seen = now


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
