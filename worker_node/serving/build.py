"""From settings and installed models to served models: which engine runs each placement, with what options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from worker_node.devices import compile_cache
from worker_node.devices.npu_source import NpuSource
from worker_node.devices.probe import Probe
from worker_node.domain import Device
from worker_node.engines.messages import EngineSpec
from worker_node.errors import ConfigurationError, ModelNotFound
from worker_node.hosting.cpu_turns import CpuPlace, CpuRole, CpuTurns
from worker_node.hosting.life import Canary, HostingLimits
from worker_node.hosting.liveness import LivenessLimits
from worker_node.hosting.restart import RestartLimits
from worker_node.hosting.slots import LoadingSlots
from worker_node.hosting.supervisor import SupervisedEngine
from worker_node.hosting.suspicion import Suspects
from worker_node.manager.placement import Placement
from worker_node.manager.residency import Residency
from worker_node.manager.served import ServedModel
from worker_node.models.manifest import MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE, InstalledModel
from worker_node.models.weights import check_weights
from worker_node.options.blobs import BlobOptions
from worker_node.registry import tasks
from worker_node.scheduling.admission import Admission
from worker_node.serving.engine_plan import plan_engine, refuse_foreign_options
from worker_node.serving.limits import admission_limits, growth_limits
from worker_node.serving.memory import estimate_bytes, memory_pool
from worker_node.serving.task import EnginePlan, ModelParts, ServedTask, served_task
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings

log = logging.getLogger(__name__)

_HASHED = (MANIFEST_FILE, MODEL_FILE)


@dataclass(frozen=True, slots=True)
class Machine:
    """The node's settings and the devices that it found.

    Engines write what they compile to `export_blobs`, for `npu-node compile`.
    """

    settings: NodeSettings
    probe: Probe
    npu: NpuSource
    slots: LoadingSlots = field(default_factory=LoadingSlots)
    export_blobs: Path | None = None
    turns: CpuTurns = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", CpuTurns(self.settings.share_beside_chats))

    def devices(self) -> tuple[Device, ...]:
        """The devices that a model may be placed on, in the order of preference."""
        emulated = {Device.NPU} if self.npu.emulated else set()
        return tuple(device for device in Device if device in emulated or self.probe.find(device) is not None)


def build_model(
    installed: InstalledModel,
    wanted: ModelSettings,
    machine: Machine,
    guard: Callable[[Canary], Canary] = lambda canary: canary,
) -> ServedModel:
    """Return the model with its tokenizer and its engines, none started. Raises ConfigurationError.

    `guard` wraps a canary that needs the device as a request does.
    """
    refuse_foreign_options(installed, wanted)
    task = served_task(installed.kind)

    def place(canary: Callable[[int], Canary]) -> tuple[Placement, ...]:
        return _placements(task, installed, wanted, machine, canary)

    return task.build(ModelParts(installed, wanted, machine.settings, place, guard))


def build_on_demand(machine: Machine, installed: InstalledModel) -> ServedModel:
    """As `build_model`, for a model that the settings do not name: its engines are loaded when requests need them.

    Raises ModelNotFound for what is installed for other models to use, as what finds speech.
    """
    if installed.kind not in tasks():
        raise ModelNotFound(f"model {installed.id} is a part of other models: no task serves it", param="model")
    check_weights(installed.path)
    places = tuple(PlacementSettings(device=device, load="lazy") for device in machine.devices())
    return build_model(installed, ModelSettings(name=installed.id, placements=places), machine)


def _placements(
    task: ServedTask,
    installed: InstalledModel,
    wanted: ModelSettings,
    machine: Machine,
    canary: Callable[[int], Canary],
) -> tuple[Placement, ...]:
    places = wanted.placements
    if places is None:
        places = tuple(PlacementSettings(device=device) for device in machine.devices())
    if not places:
        raise ConfigurationError(
            f"{installed.id}: OpenVINO sees no device here ({machine.probe.error or 'none listed'})"
        )
    devices = [place.device for place in places]
    suspects = Suspects()
    return tuple(
        _placement(task, installed, wanted, place, devices, machine, canary, suspects, first=index == 0)
        for index, place in enumerate(places)
    )


def _placement(
    task: ServedTask,
    installed: InstalledModel,
    wanted: ModelSettings,
    place: PlacementSettings,
    beside: Collection[Device],
    machine: Machine,
    canary: Callable[[int], Canary],
    suspects: Suspects,
    *,
    first: bool,
) -> Placement:
    settings = machine.settings
    plan = plan_engine(installed, wanted, place, beside, settings, machine.npu)
    emulated = machine.npu.emulated and place.device is Device.NPU
    notes = [f"{name} is ignored: the engine for {place.device} has no use for it" for name in plan.ignored]
    notes += task.notes(installed, plan)
    options = plan.options
    blobs = None
    if isinstance(options, BlobOptions):
        export = machine.export_blobs
        options = replace(options, export_blobs=None if export is None else str(export))
        blobs = options.blobs
    ahead = blobs is not None or machine.export_blobs is not None
    if not ahead and task.keeps_compiled(place.device, emulated=emulated):
        try:
            root = wanted.compile_cache or settings.compile_cache
            key = _cache_key(installed, place.device, plan, machine, emulated=emulated)
            kept = compile_cache.prepare(root.expanduser(), key, installed.path.resolve())
            options = replace(options, cache_dir=str(kept))
        except OSError as error:
            notes.append(f"nothing compiled is kept: {root} cannot be written ({error.strerror})")
    for note in notes:
        log.warning("%s on %s: %s", installed.id, place.device, note)
    spec = EngineSpec(
        model_id=installed.id,
        kind=installed.kind,
        path=str(installed.path),
        device=place.device,
        runner=plan.options.runner,
        options=asdict(options),
        emulated=emulated,
        loads=None if blobs is None else f"the blobs in {blobs}",
        nice=settings.engine_nice,
    )
    hosting = HostingLimits(
        load_timeout_s=settings.load_timeout_s,
        liveness=LivenessLimits(settings.watchdog_s, settings.run_timeout_s),
        canary_interval_s=settings.canary_interval_s,
        restart=RestartLimits(
            crash_limit=settings.crash_limit,
            crash_window_s=settings.crash_window_s,
            quarantine_s=settings.quarantine_s,
        ),
        growth=growth_limits(settings.engine_memory_growth, place.device, emulated=emulated),
    )
    lazy = place.load == "lazy" or (place.load is None and not first)
    slot = machine.slots.slot(place.device.value)
    cpu = CpuPlace(machine.turns, task.cpu_role if place.device is Device.CPU else CpuRole.APART)
    return Placement(
        device=place.device,
        engine=SupervisedEngine(
            spec, canary(plan.prompt_limit), hosting, lazy=True, slot=slot, suspects=suspects, cpu=cpu
        ),
        admission=Admission(f"{installed.id} on {place.device}", admission_limits(plan, wanted.max_outstanding)),
        prompt_limit=plan.prompt_limit,
        total_limit=plan.total_limit,
        emulated=emulated,
        on_demand=lazy or wanted.idle_unload_s is not None,
        notes=tuple(notes),
        options=plan.chosen(wanted.options),
        lacks=task.lacks(plan.options),
        parts=task.parts(plan.options),
        uses=task.uses(plan.options),
        suspects=suspects,
        eager=not lazy,
        residency=Residency(
            estimate=estimate_bytes(installed, plan),
            weights=installed.size,
            pinned=not lazy and wanted.idle_unload_s is None,
            pool=memory_pool(machine.probe, place.device),
        ),
    )


def _cache_key(
    installed: InstalledModel, device: Device, plan: EnginePlan, machine: Machine, *, emulated: bool
) -> compile_cache.CacheKey:
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
