"""The placements of a model: one supervised engine on each of its devices, with options, admission and memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device
from worker_node.devices import compile_cache
from worker_node.engines.cpu_share import CpuPlace, CpuRole
from worker_node.engines.isolation import Suspects
from worker_node.engines.process import Canary, HostingLimits
from worker_node.engines.protocol import EngineSpec
from worker_node.engines.restart import RestartLimits
from worker_node.engines.supervisor import SupervisedEngine
from worker_node.engines.watchdog import LivenessLimits
from worker_node.manager.placement import Placement
from worker_node.manager.residency import Residency
from worker_node.models.manifest import MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE, InstalledModel
from worker_node.scheduling.admission import Admission
from worker_node.serving.engine_plan import plan_engine
from worker_node.serving.limits import admission_limits, growth_limits
from worker_node.serving.machine import Machine
from worker_node.serving.memory import estimate_bytes, memory_pool
from worker_node.serving.task import EnginePlan, ServedTask
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings
from worker_node.settings.declaration import BlobOptions, EngineOptions

log = logging.getLogger(__name__)

_HASHED = (MANIFEST_FILE, MODEL_FILE)


def build_placements(
    task: ServedTask,
    installed: InstalledModel,
    wanted: ModelSettings,
    machine: Machine,
    canary: Callable[[int], Canary],
) -> tuple[Placement, ...]:
    """Return the placements in order of preference: those of the settings, else one on each device of the machine.

    `canary` makes the canary of an engine from its prompt limit in tokens. No engine is started. Raises
    ConfigurationError, also when there is no device.
    """
    places = wanted.placements
    if places is None:
        places = tuple(PlacementSettings(device=device) for device in machine.devices())
    if not places:
        raise ConfigurationError(
            f"{installed.id}: OpenVINO sees no device here ({machine.probe.error or 'none listed'})"
        )
    model = _PlacedModel(task, installed, wanted, machine, canary, [place.device for place in places])
    # Unless the settings say otherwise, only the first is loaded at start: the others serve what it cannot.
    return tuple(model.placement(place, first=index == 0) for index, place in enumerate(places))


@dataclass(frozen=True, slots=True)
class _PlacedModel:
    """What all placements of one model have in common."""

    task: ServedTask
    installed: InstalledModel
    wanted: ModelSettings
    machine: Machine
    canary: Callable[[int], Canary]
    devices: Collection[Device]
    suspects: Suspects = field(default_factory=Suspects)

    def placement(self, place: PlacementSettings, *, first: bool) -> Placement:
        installed, wanted, machine, task = self.installed, self.wanted, self.machine, self.task
        device, emulated = place.device, machine.emulates(place.device)
        plan = plan_engine(installed, wanted, place, self.devices, machine.settings, machine.npu)
        notes = [f"{name} is ignored: the engine for {device} has no use for it" for name in plan.ignored]
        notes += task.notes(installed, plan)
        options = self._final_options(plan, device, notes)
        for note in notes:
            log.warning("%s on %s: %s", installed.id, device, note)
        lazy = place.load == "lazy" or (place.load is None and not first)
        return Placement(
            device=device,
            engine=self._engine(plan, device, options),
            admission=Admission(f"{installed.id} on {device}", admission_limits(plan, wanted.max_outstanding)),
            prompt_limit=plan.prompt_limit,
            total_limit=plan.total_limit,
            emulated=emulated,
            on_demand=lazy or wanted.idle_unload_s is not None,
            notes=tuple(notes),
            options=plan.chosen(wanted.options),
            lacks=task.lacks(plan.options),
            parts=task.parts(plan.options),
            uses=task.uses(plan.options),
            suspects=self.suspects,
            eager=not lazy,
            residency=Residency(
                estimate=estimate_bytes(installed, plan),
                weights=installed.size,
                pinned=not lazy and wanted.idle_unload_s is None,
                pool=memory_pool(machine.probe, device),
                cold=device is Device.NPU and not emulated and not _compiled(options),
            ),
        )

    def _final_options(self, plan: EnginePlan, device: Device, notes: list[str]) -> EngineOptions:
        """The planned options, with the directories for compiled models; adds a note where there can be no cache."""
        options = plan.options
        compiled_ahead = False
        if isinstance(options, BlobOptions):
            export = self.machine.export_blobs
            options = replace(options, export_blobs=None if export is None else str(export))
            compiled_ahead = options.blobs is not None
        if compiled_ahead or self.machine.export_blobs is not None:
            return options
        if not self.task.keeps_compiled(device, emulated=self.machine.emulates(device)):
            return options
        root = self.wanted.compile_cache or self.machine.settings.compile_cache
        try:
            key = _cache_key(self.installed, device, plan, self.machine)
            kept = compile_cache.prepare(root.expanduser(), key, self.installed.path.resolve())
        except OSError as error:
            notes.append(f"nothing compiled is kept: {root} cannot be written ({error.strerror})")
            return options
        return replace(options, cache_dir=str(kept))

    def _engine(self, plan: EnginePlan, device: Device, options: EngineOptions) -> SupervisedEngine:
        machine, emulated = self.machine, self.machine.emulates(device)
        blobs = options.blobs if isinstance(options, BlobOptions) else None
        spec = EngineSpec(
            model_id=self.installed.id,
            kind=self.installed.kind,
            path=str(self.installed.path),
            device=device,
            runner=plan.options.runner,
            options=asdict(options),
            emulated=emulated,
            loads=None if blobs is None else f"the blobs in {blobs}",
            nice=machine.settings.engine_nice,
        )
        return SupervisedEngine(
            spec,
            self.canary(plan.prompt_limit),
            _hosting_limits(machine.settings, device, emulated=emulated),
            lazy=True,
            slot=machine.slots.slot(device.value),
            suspects=self.suspects,
            cpu=CpuPlace(machine.turns, self.task.cpu_role if device is Device.CPU else CpuRole.APART),
        )


def _compiled(options: EngineOptions) -> bool:
    """Whether what is compiled for the engine is there already."""
    if isinstance(options, BlobOptions) and options.blobs is not None:
        return True
    return options.cache_dir is not None and any(Path(options.cache_dir).glob("*.blob"))


def _hosting_limits(settings: NodeSettings, device: Device, *, emulated: bool) -> HostingLimits:
    return HostingLimits(
        load_timeout_s=settings.load_timeout_s,
        liveness=LivenessLimits(settings.watchdog_s, settings.run_timeout_s),
        canary_interval_s=settings.canary_interval_s,
        restart=RestartLimits(
            crash_limit=settings.crash_limit,
            crash_window_s=settings.crash_window_s,
            quarantine_s=settings.quarantine_s,
        ),
        growth=growth_limits(settings.engine_memory_growth, device, emulated=emulated),
    )


def _cache_key(installed: InstalledModel, device: Device, plan: EnginePlan, machine: Machine) -> compile_cache.CacheKey:
    emulated = machine.emulates(device)
    info = machine.probe.find(device)
    properties = info.properties if info is not None and not emulated else {}
    # A manifest names the weights by their hashes; without one, two sets of them may share a graph and a name.
    stamped = () if (installed.path / MANIFEST_FILE).is_file() else (WEIGHTS_FILE,)
    return compile_cache.CacheKey(
        model=installed.id,
        model_hash=compile_cache.model_hash(installed.path, _HASHED, stamped),
        device=f"{device}-emulated" if emulated else device.value,
        openvino=machine.probe.openvino or "unknown",
        driver=properties.get("NPU_DRIVER_VERSION"),
        compiler=properties.get("NPU_COMPILER_VERSION"),
        lengths=plan.lengths,
    )
