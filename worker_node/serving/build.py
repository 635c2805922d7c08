"""From settings and installed models to served models: which engine runs each placement, with what options."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace

from worker_node.devices import compile_cache
from worker_node.devices.npu_source import NpuSource
from worker_node.devices.probe import Probe
from worker_node.domain import Device, ModelKind
from worker_node.engines.messages import EngineSpec
from worker_node.errors import ConfigurationError
from worker_node.hosting.life import Canary, HostingLimits
from worker_node.hosting.liveness import LivenessLimits
from worker_node.hosting.restart import RestartLimits
from worker_node.hosting.slots import LoadingSlots
from worker_node.hosting.supervisor import SupervisedEngine
from worker_node.hosting.suspicion import Suspects
from worker_node.manager.placement import Placement
from worker_node.manager.residency import Residency
from worker_node.manager.served import ServedModel
from worker_node.models.canary import EmbeddingCanary, GenerationCanary
from worker_node.models.generation_defaults import sampling_defaults
from worker_node.models.manifest import MANIFEST_FILE, MODEL_FILE, WEIGHTS_FILE, InstalledModel
from worker_node.models.weights import check_weights
from worker_node.options.generation import GenerationOptions
from worker_node.routing import NOTHING, Feature
from worker_node.scheduling.admission import Admission
from worker_node.serving.canary import embedding_canary, generation_canary
from worker_node.serving.embedding_tokenizer import EmbeddingTokenizer
from worker_node.serving.engine_plan import EnginePlan, plan_engine, refuse_foreign_options
from worker_node.serving.kv_cache import kv_cache_bytes
from worker_node.serving.limits import admission_limits, growth_limits
from worker_node.serving.memory import estimate_bytes, memory_pool
from worker_node.serving.models import EmbeddingModel, GenerationModel
from worker_node.serving.tokenization import ChatTokenizer
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings
from worker_node.tasks.generate.stateful_options import StatefulOptions

log = logging.getLogger(__name__)

_LACKS: dict[str, frozenset[Feature]] = {"generation_stateful": frozenset({"n", "logprobs"})}
_HASHED = (MANIFEST_FILE, MODEL_FILE)


@dataclass(frozen=True, slots=True)
class Machine:
    """The node's settings and the devices that it found."""

    settings: NodeSettings
    probe: Probe
    npu: NpuSource
    slots: LoadingSlots = field(default_factory=LoadingSlots)

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

    `guard` wraps the examination of a generation model, which is itself a generation.
    """
    refuse_foreign_options(installed, wanted)
    if installed.kind is ModelKind.EMBEDDING:
        return _embedding_model(installed, wanted, machine)
    chat = ChatTokenizer(installed.path, installed.context_limit)
    canary: Canary = _no_canary
    if isinstance(installed.canary, GenerationCanary):
        canary = guard(generation_canary(installed.canary, chat))
    placements = _placements(installed, wanted, machine, canary)
    limits = wanted.of(GenerationOptions)
    defaults = sampling_defaults(installed.path)
    greedy = (limits.sampling_defaults or machine.settings.sampling_defaults) == "greedy"
    return GenerationModel(
        installed,
        placements,
        chat,
        limits.max_tokens_limit or sys.maxsize,
        limits.best_of_limit,
        None if greedy else defaults,
        aliases=wanted.aliases,
        idle_unload_s=wanted.idle_unload_s,
    )


def build_on_demand(machine: Machine, installed: InstalledModel) -> ServedModel:
    """As `build_model`, for a model that the settings do not name: its engines are loaded when requests need them."""
    check_weights(installed.path)
    places = tuple(PlacementSettings(device=device, load="lazy") for device in machine.devices())
    return build_model(installed, ModelSettings(name=installed.id, placements=places), machine)


def _embedding_model(installed: InstalledModel, wanted: ModelSettings, machine: Machine) -> EmbeddingModel:
    if installed.space is None or installed.dimensions is None:
        raise ConfigurationError(f"{installed.path}: an embedding model without dimensions or space; pull it again")
    tokenizer = EmbeddingTokenizer(installed.path, installed.context_limit)
    canary: Canary = _no_canary
    if isinstance(installed.canary, EmbeddingCanary):
        canary = embedding_canary(installed.canary, tokenizer)
    return EmbeddingModel(
        installed,
        _placements(installed, wanted, machine, canary),
        tokenizer,
        installed.space,
        installed.dimensions,
        aliases=wanted.aliases,
        idle_unload_s=wanted.idle_unload_s,
    )


async def _no_canary(_engine: object) -> None:
    """A model that was brought without known answers is ready as soon as it is loaded."""


def _placements(
    installed: InstalledModel, wanted: ModelSettings, machine: Machine, canary: Canary
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
        _placement(installed, wanted, place, devices, machine, canary, suspects, first=index == 0)
        for index, place in enumerate(places)
    )


def _placement(
    installed: InstalledModel,
    wanted: ModelSettings,
    place: PlacementSettings,
    beside: Collection[Device],
    machine: Machine,
    canary: Canary,
    suspects: Suspects,
    *,
    first: bool,
) -> Placement:
    settings = machine.settings
    plan = plan_engine(installed, wanted, place, beside, settings, machine.npu)
    emulated = machine.npu.emulated and place.device is Device.NPU
    notes = [f"{name} is ignored: the engine for {place.device} has no use for it" for name in plan.ignored]
    notes += _memory_note(installed, plan)
    options = plan.options
    if _worth_keeping(installed, place.device, emulated=emulated):
        try:
            root = wanted.compile_cache or settings.compile_cache
            key = _cache_key(installed, place.device, plan, machine, emulated=emulated)
            options = replace(options, cache_dir=str(compile_cache.prepare(root.expanduser(), key)))
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
    return Placement(
        device=place.device,
        engine=SupervisedEngine(spec, canary, hosting, lazy=True, slot=slot, suspects=suspects),
        admission=Admission(f"{installed.id} on {place.device}", admission_limits(plan, wanted.max_outstanding)),
        prompt_limit=plan.prompt_limit,
        total_limit=plan.total_limit,
        emulated=emulated,
        on_demand=lazy or wanted.idle_unload_s is not None,
        notes=tuple(notes),
        lacks=_LACKS.get(plan.runner, NOTHING),
        suspects=suspects,
        eager=not lazy,
        residency=Residency(
            estimate=estimate_bytes(installed, plan),
            weights=installed.size,
            pinned=not lazy and wanted.idle_unload_s is None,
            pool=memory_pool(machine.probe, place.device),
        ),
    )


def _memory_note(installed: InstalledModel, plan: EnginePlan) -> list[str]:
    """What a prompt limit above the usual one costs; the cache is static, so it is taken whether it is used or not."""
    if plan.runner != "generation_stateful" or plan.lengths[0] <= StatefulOptions().max_prompt_len:
        return []
    size = kv_cache_bytes(installed.path, plan.total_limit)
    told = "an unknown amount" if size is None else f"{size / 2**20:.0f} MiB"
    return [f"max_prompt_len {plan.lengths[0]} makes a static KV cache of {plan.total_limit} tokens: {told} of memory"]


def _worth_keeping(installed: InstalledModel, device: Device, *, emulated: bool) -> bool:
    """Whether compiling takes long enough to keep the result: not for the CPU, nor, at half a second and a copy of all
    weights for each bucket, for an embedding model on the emulated NPU."""
    return device is not Device.CPU and not (emulated and installed.kind is ModelKind.EMBEDDING)


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
