"""From the settings and the installed models to served models: their files, placements, engines, limits and memory.

Begin with `configured_model` and `build_model`. Nothing is started or loaded here.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import logging
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from worker_node.core.errors import ConfigurationError, ModelNotFound
from worker_node.core.types import Device
from worker_node.devices import compile_cache
from worker_node.devices.memory import machine_memory
from worker_node.devices.npu import NpuSource
from worker_node.devices.probe import Probe
from worker_node.engines.isolation import Suspects
from worker_node.engines.options import (
    BlobOptions,
    EngineOptions,
    NpuOptions,
    declarations,
    engine_for,
    engines,
    options_of,
)
from worker_node.engines.process import Canary, EngineLimits, Prewarm
from worker_node.engines.protocol import EngineSpec
from worker_node.engines.restart import GrowthLimits, RestartLimits, default_growth
from worker_node.engines.supervisor import Engine
from worker_node.engines.watchdog import LivenessLimits
from worker_node.manager.placement import ExcludedPlacement, Placement
from worker_node.manager.served import FailedModel, ServedModel
from worker_node.models.catalog import normalise_name
from worker_node.models.directory import (
    MANIFEST_FILE,
    MODEL_FILE,
    WEIGHTS_FILE,
    InstalledModel,
    content_hash,
    runtime_problem,
)
from worker_node.models.npu_rules import doubts_on_npu, known_prompt_limit, problem_on_npu
from worker_node.models.passports import NOT_CERTIFIED, Identity, PassportStore, Standing, standing
from worker_node.models.store import ModelStore, apparent_kind, open_directory
from worker_node.registry import tasks
from worker_node.scheduling.admission import Admission
from worker_node.serving.demanded_faults import faults_of, faulty
from worker_node.serving.task import EnginePlan, ServedTask, Target, served_task
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings
from worker_node.settings.model import VectorOptions

log = logging.getLogger(__name__)

PREPARED = "prepared"
HOST = "host"
_SHARE = 0.8
# Measured: beside reranking or speech a chat's tokens take 1.3 times as long, and 2 to 2.7 times at equal priority.
_NICE_BESIDE_CHATS = 10


@dataclass(slots=True)
class Machine:
    """The node's settings and the devices that it found last.

    Engines write what they compile to `export_blobs`, for `npu-node compile`, and compile for the NPU `platform` of
    another machine if it is given.
    """

    settings: NodeSettings
    probe: Probe
    npu: NpuSource
    export_blobs: Path | None = None
    platform: str | None = None

    def devices(self) -> tuple[Device, ...]:
        """The devices that a model may be placed on, in order of preference."""
        wanted = self.settings.devices or Device
        return tuple(device for device in wanted if self.emulates(device) or self.probe.find(device) is not None)

    def emulates(self, device: Device) -> bool:
        return self.npu.emulated and device is Device.NPU

    def target(self, installed: InstalledModel, wanted: ModelSettings, device: Device) -> Target:
        memory = self.settings.memory_budget or machine_memory().total
        emulated = self.emulates(device)
        real = self.probe.properties(device) if device is Device.NPU and not emulated else {}
        return Target(installed, wanted, device, emulated, memory, real.get("DEVICE_ARCHITECTURE"))


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
    except UnusableFiles as damage:
        return _failed(wanted, machine, damage)


def _failed(wanted: ModelSettings, machine: Machine, damage: UnusableFiles, kind: str | None = None) -> FailedModel:
    """The model with that damage; its files tell a `kind` of None, else the catalog does."""
    store = ModelStore(machine.settings.model_store)
    entry = store.catalog.find(wanted.name) if wanted.path is None else None
    if kind is None:
        with contextlib.suppress(ModelNotFound, OSError):
            kind = apparent_kind(store.locate(wanted.name) if wanted.path is None else wanted.path.expanduser())
    if kind is None and entry is not None:
        kind = entry.kind

    names = [*wanted.aliases, *((entry.id, *entry.aliases) if entry is not None else ())]
    aliases = [name for name in names if normalise_name(name) != normalise_name(wanted.name)]
    return FailedModel(
        wanted.name,
        damage.message,
        lambda: _build(wanted, machine),
        aliases,
        kind,
        damage.installed,
        damage.excluded,
    )


def _build(wanted: ModelSettings, machine: Machine) -> ServedModel:
    installed = installed_model(wanted, ModelStore(machine.settings.model_store), machine.settings)
    try:
        model = build_model(installed, wanted, machine)
    except ConfigurationError:
        raise
    except Exception as error:  # tokenizers and OpenVINO raise types of their own for damaged files
        said = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())[:300]
        raise UnusableFiles(
            f"{installed.path}: its files are damaged ({type(error).__name__}: {said}); pull or copy it again"
        ) from error
    model.if_failed = _failed(wanted, machine, UnusableFiles(""), installed.kind)
    return model


def build_model(
    installed: InstalledModel,
    wanted: ModelSettings,
    machine: Machine,
    guard: Callable[[Canary], Canary] = lambda canary: canary,
) -> ServedModel:
    """Return the model, no engine started. `guard` wraps a canary that needs the device as a request does."""
    check_options(installed, wanted)
    newer = None if wanted.allow_known_bad else runtime_problem(installed.path, machine.probe.openvino or "")
    if newer is not None:
        raise UnusableFiles(
            f"{newer}: update the node, or export the model again with that version; allow_known_bad loads it as it is"
        )

    task = served_task(installed.kind)
    plans, excluded = plan_model(task, installed, wanted, machine)
    for each in excluded:
        log.warning("%s is not used on %s: %s", installed.id, each.device, each.reason)
    if not plans:
        reasons = "; ".join(f"{each.device}: {each.reason}" for each in excluded)
        raise UnusableFiles(f"{installed.id} has no placement that may be used: {reasons}", excluded=excluded)

    model: ServedModel = task.open(installed, wanted, machine.settings)
    suspects = Suspects()
    placements = []
    for plan in plans:
        canary = task.canary(model, wanted, plan.engine)
        examination = no_canary if canary is None else guard(canary)
        prewarm, missed = task.prewarm(model, wanted, plan.engine)
        noted = replace(plan, notes=(*plan.notes, *missed))
        placements.append(_placement(task, noted, machine, examination, prewarm, suspects))

    model.placements, model.excluded = tuple(placements), excluded
    model.aliases, model.idle_unload_s = wanted.aliases, wanted.idle_unload_s
    return model


async def no_canary(_engine: object) -> None:
    """The canary of a model without known answers: the model is ready as soon as it is loaded."""


def build_on_demand(machine: Machine, installed: InstalledModel) -> ServedModel:
    """As `build_model`, for a model that the settings do not name: its engines are loaded when requests need them.

    Raises ModelNotFound for a model that only other models use, such as the one that detects speech.
    """
    if installed.kind not in tasks():
        raise ModelNotFound(f"model {installed.id} is a part of other models: no task serves it", param="model")
    places = tuple(PlacementSettings(device=device, load="lazy") for device in machine.devices())
    return build_model(installed, ModelSettings(name=installed.id, placements=places), machine)


class UnusableFiles(ConfigurationError):
    """Files are missing or damaged (`installed`: some are there), or no device may run them (`excluded`)."""

    def __init__(self, reason: str, *, installed: bool = True, excluded: Sequence[ExcludedPlacement] = ()) -> None:
        super().__init__(reason)
        self.installed = installed
        self.excluded = excluded


def installed_model(wanted: ModelSettings, store: ModelStore, settings: NodeSettings) -> InstalledModel:
    """Find the model; an encoder of a directory is prepared, which takes seconds. Raises ConfigurationError."""
    vectors = wanted.of(VectorOptions)
    if wanted.path is None and vectors != VectorOptions():
        raise wanted.error("pooling", "pooling and normalize need a path; an installed model has its own")
    try:
        if wanted.path is None:
            installed = store.get(wanted.name)
        else:
            prepared = (wanted.compile_cache or settings.compile_cache).expanduser() / PREPARED
            installed = open_directory(
                wanted.path.expanduser(),
                wanted.name,
                prepared,
                pooling=vectors.pooling,
                normalize=vectors.normalize,
            )
    except ModelNotFound as error:
        missing = wanted.error("name", f"it {not_installed(wanted.name, settings.model_store)}")
        raise UnusableFiles(missing.message, installed=False) from error
    except ConfigurationError as error:
        damage = error if wanted.path is None else wanted.error("path", error.message)
        raise UnusableFiles(damage.message) from error
    return installed


def not_installed(name: str, store: Path) -> str:
    return f"is not installed in {store}; run: npu-node pull {name} --model-store {shlex.quote(str(store))}"


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """One placement before it exists. `notes` are warnings for the operator."""

    target: Target
    engine: EnginePlan
    eager: bool
    standing: Standing
    notes: tuple[str, ...]


def plan_model(
    task: ServedTask[Any], installed: InstalledModel, wanted: ModelSettings, machine: Machine
) -> tuple[list[PlacementPlan], list[ExcludedPlacement]]:
    """Plan the placements in order of preference, those of the settings, else one on each device of the machine.

    The second list are those that may not be used. Nothing is written. Raises ConfigurationError, also when there is no
    device.
    """
    places = wanted.placements
    if places is None:
        places = tuple(PlacementSettings(device=device) for device in machine.devices())
    if not places:
        raise ConfigurationError(
            f"{installed.id}: OpenVINO sees no device that it may use ({machine.probe.error or 'see devices'})"
        )

    plans: list[PlacementPlan] = []
    excluded: list[ExcludedPlacement] = []
    for place in places:
        target = machine.target(installed, wanted, place.device)
        standing = standing_of(installed, wanted, place.device, machine.probe, machine.settings)
        problem = refusal(standing, required=machine.settings.require_certified)
        if problem is None and not target.emulated:
            problem = known_problem(installed, wanted, place.device, machine.probe)
        if problem is not None:
            excluded.append(ExcludedPlacement(place.device, target.emulated, standing, problem))
            continue

        engine = plan_engine(task, target, place, machine, standing)
        ignored = tuple(
            f"{name} is ignored: the engine for {place.device} has no use for it"
            for name in _unused(target, beside=[each.device for each in places])
        )

        # Unless the settings say otherwise, only the first is loaded at start: the others serve what it cannot.
        eager = place.load == "eager" or (place.load is None and not plans)
        doubts = doubts_on_npu(installed) if place.device is Device.NPU and not target.emulated else ()
        plans.append(PlacementPlan(target, engine, eager, standing, (*ignored, *engine.notes, *doubts)))
    return plans, excluded


def _unused(target: Target, beside: Collection[Device]) -> list[str]:
    kind = target.installed.kind
    every = {name for owner in engines() if owner.task == kind for name in options_of(owner)}
    used = set(options_of(engine_for(kind, target.device)))
    if target.device is not Device.NPU and Device.NPU in beside:
        used |= options_of(engine_for(kind, Device.NPU)).keys()  # they are for the other placement
    return sorted((target.wanted.options.keys() & every) - used)


def plan_engine(
    task: ServedTask[Any],
    target: Target,
    place: PlacementSettings,
    machine: Machine,
    standing: Standing = NOT_CERTIFIED,
) -> EnginePlan:
    """Plan the engine of one placement. Raises ConfigurationError when its lengths do not fit the model."""
    npu, wanted = machine.npu, target.wanted
    given = replace(wanted.of(engine_for(target.installed.kind, place.device)), plugin_config=dict(place.plugin_config))
    if place.device is Device.NPU and isinstance(given, NpuOptions):
        given = replace(given, busy_counter=str(npu.busy_counter), stand_in=npu.stand_in)
    plan = task.plan(given, target)
    if wanted.max_outstanding is not None:
        plan = replace(plan, admission=replace(plan.admission, max_outstanding=wanted.max_outstanding))

    if (known := _prompt_limit(target, standing, machine)) is not None:
        limit, source = known
        if limit < plan.prompt_limit:
            note = f"prompts of more than {limit} tokens do not go there: {source}"
            plan = replace(plan, prompt_limit=limit, notes=(*plan.notes, note))
    return plan


def _prompt_limit(target: Target, standing: Standing, machine: Machine) -> tuple[int, str] | None:
    """Tokens of the longest prompt that the device is known to answer right, and what says so; None for any."""
    limits = []
    passport = standing.passport
    if passport is not None and passport.limits.max_prompt_tokens is not None:
        limits.append((passport.limits.max_prompt_tokens, f"its passport, of {passport.made}"))
    if target.device is Device.NPU:
        most = machine.settings.npu_token_limit
        if most is not None:
            limits.append((most, "npu_token_limit"))
        if not limits:
            architecture = target.architecture or "unknown"
            tokens, source = known_prompt_limit(target.installed, architecture, machine.probe.openvino)
            limits.append((tokens, f"no more is known to be right ({source}); npu-node certify can prove more"))
    return min(limits, default=None)


def _placement(
    task: ServedTask[Any],
    plan: PlacementPlan,
    machine: Machine,
    canary: Canary,
    prewarm: Prewarm | None,
    suspects: Suspects,
) -> Placement:
    engine, target, proven = plan.engine, plan.target, plan.standing.passport
    installed, wanted, device = target.installed, target.wanted, target.device
    options, problem = _with_directories(task, plan, machine)
    faults = faults_of(installed.id, device, machine.settings)
    notes = plan.notes if problem is None else (*plan.notes, problem)
    notes += tuple(f"fault on demand: {fault}" for fault in faults)
    for note in notes:
        log.warning("%s on %s: %s", installed.id, device, note)

    admission = Admission(f"{installed.id} on {device}", engine.admission)
    if proven is not None:
        admission.assume(proven.rates.prompt_tokens_per_s, proven.rates.tokens_per_s)

    blobs = options.blobs if isinstance(options, BlobOptions) else None
    yields = task.yields_to_chats and device is Device.CPU
    spec = EngineSpec(
        model_id=installed.id,
        kind=installed.kind,
        path=str(installed.path),
        device=device,
        runner=options.runner,
        options=asdict(options),
        emulated=target.emulated,
        loads=None if blobs is None else f"the blobs in {blobs}",
        nice=machine.settings.engine_nice + (_NICE_BESIDE_CHATS if yields else 0),
        energy_sysfs=None if machine.settings.energy_sysfs is None else str(machine.settings.energy_sysfs),
    )

    settings = machine.settings
    limits = EngineLimits(
        load_timeout_s=settings.load_timeout_s,
        liveness=LivenessLimits(settings.watchdog_s, settings.run_timeout_s),
        canary_interval_s=settings.canary_interval_s,
        restart=RestartLimits(
            crash_limit=settings.crash_limit,
            crash_window_s=settings.crash_window_s,
            quarantine_s=settings.quarantine_s,
        ),
        growth=GrowthLimits(settings.engine_memory_growth or default_growth(machine_memory().total)),
    )

    compiled = blobs is not None or (options.cache_dir is not None and any(Path(options.cache_dir).glob("*.blob")))
    return Placement(
        device=device,
        engine=Engine(
            faulty(spec, faults),
            canary,
            limits,
            prewarm=prewarm,
            suspects=suspects,
            proven_with=None if proven is None else (proven.driver, proven.openvino),
        ),
        admission=admission,
        prompt_limit=engine.prompt_limit,
        total_limit=engine.total_limit,
        standing=plan.standing,
        emulated=target.emulated,
        notes=notes,
        faults=tuple(map(str, faults)),
        options={name: getattr(options, name) for name in options_of(type(options)) if name in wanted.options},
        lacks=engine.lacks,
        parts=engine.parts,
        suspects=suspects,
        eager=plan.eager,
        estimate=engine.memory,
        weights=installed.size,
        pinned=plan.eager and wanted.idle_unload_s is None,
        pool=HOST if _own_memory(machine.probe, device) is None else device.value,
        cold=device is Device.NPU and not target.emulated and not compiled,
    )


def _with_directories(task: ServedTask[Any], plan: PlacementPlan, machine: Machine) -> tuple[EngineOptions, str | None]:
    """The planned options with the directories for compiled models, and why there can be no cache."""
    options, target, export = plan.engine.options, plan.target, machine.export_blobs
    if isinstance(options, BlobOptions):
        options = replace(options, export_blobs=None if export is None else str(export), platform=machine.platform)
        if options.blobs is not None:
            return options, None
    if export is not None or target.device is Device.CPU or (target.emulated and not task.keeps_emulated):
        return options, None
    root = target.wanted.compile_cache or machine.settings.compile_cache
    try:
        kept = compile_cache.prepare(root.expanduser(), _cache_key(plan, machine))
    except OSError as error:
        return options, f"nothing compiled is kept: {root} cannot be written ({error.strerror})"
    return replace(options, cache_dir=str(kept)), None


def _cache_key(plan: PlacementPlan, machine: Machine) -> compile_cache.CacheKey:
    installed, device, emulated = plan.target.installed, plan.target.device, plan.target.emulated
    properties = {} if emulated else machine.probe.properties(device)
    # A manifest names the weights by their hashes; without one, two sets of them may share a graph and a name.
    stamped = () if (installed.path / MANIFEST_FILE).is_file() else (WEIGHTS_FILE,)
    compiler = properties.get("NPU_COMPILER_VERSION")
    return compile_cache.CacheKey(
        model=installed.id,
        model_hash=compile_cache.model_hash(installed.path, (MANIFEST_FILE, MODEL_FILE), stamped),
        device=f"{device}-emulated" if emulated else device.value,
        openvino=machine.probe.openvino or "unknown",
        # The compiler makes the binary; what a driver cannot run, OpenVINO compiles again.
        driver=None if compiler else properties.get("NPU_DRIVER_VERSION"),
        compiler=compiler,
        lengths=plan.engine.lengths,
    )


def check_options(installed: InstalledModel, wanted: ModelSettings) -> None:
    """Raise ConfigurationError for options that no engine for this kind of model has."""
    known = {name for owner in declarations() if owner.task == installed.kind for name in options_of(owner)}
    foreign = sorted(wanted.options.keys() - known)
    if foreign:
        near = difflib.get_close_matches(foreign[0], known, 1)
        remedy = f"did you mean {near[0]}?" if near else "remove it"
        raise wanted.error(
            foreign[0], f"{', '.join(foreign)} cannot be used by an engine for {installed.kind}; {remedy}"
        )


def memory_budgets(wanted: int | None, probe: Probe) -> dict[str, int | None]:
    """Bytes that the engines together may take, by pool. `wanted` None is 80 % of what the host has free now."""
    host: int | None = int(machine_memory().available * _SHARE) if wanted is None else wanted
    own = _own_memory(probe, Device.GPU)
    return {HOST: host} | ({} if own is None else {Device.GPU.value: int(own * _SHARE)})


def _own_memory(probe: Probe, device: Device) -> int | None:
    """Bytes of a device that does not share the host's memory and says how much it has."""
    properties = probe.properties(device)
    total = properties.get("GPU_DEVICE_TOTAL_MEM_SIZE") or ""
    own = "(dGPU)" in (properties.get("FULL_DEVICE_NAME") or "")
    return int(total) if own and total.isdecimal() else None


# What passports say of placements: which may be used, and how far.


def passport_store(settings: NodeSettings) -> PassportStore:
    directory = settings.passports or settings.model_store.expanduser().parent / "passports"
    return PassportStore(directory, settings.trusted_keys)


def identity_of(
    installed: InstalledModel, wanted: ModelSettings, device: Device, probe: Probe, settings: NodeSettings
) -> Identity:
    """What a passport for the model on the device is bound to. Reads all of the model's weights, once in a process.

    With faults on demand it is another one: what is found under them says nothing of the device without.
    """
    emulated = device is Device.NPU and settings.npu_emulation
    properties = {} if emulated else probe.properties(device)
    place = next((place for place in wanted.placements or () if place.device is device), None)
    given: list[Any] = [wanted.examined_options(), {} if place is None else dict(place.plugin_config or {})]
    given += map(str, faults_of(installed.id, device, settings))

    named = properties.get("DEVICE_ARCHITECTURE") if device is Device.NPU else properties.get("FULL_DEVICE_NAME")
    return Identity(
        model=installed.id,
        model_hash=content_hash(installed.path),
        device=device.value,
        architecture="emulated" if emulated else named or "unknown",
        driver=properties.get("NPU_DRIVER_VERSION") or "",
        compiler=properties.get("NPU_COMPILER_VERSION") or "",
        openvino=probe.openvino or "unknown",
        settings_hash=hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest(),
        emulated=emulated,
    )


def standing_of(
    installed: InstalledModel, wanted: ModelSettings, device: Device, probe: Probe, settings: NodeSettings
) -> Standing:
    store = passport_store(settings)
    found = store.of(installed.id, device.value)
    if not found:
        return NOT_CERTIFIED
    return standing(found, identity_of(installed, wanted, device, probe, settings))


def known_problem(installed: InstalledModel, wanted: ModelSettings, device: Device, probe: Probe) -> str | None:
    """What others report of the model on a real device like this one; None if nothing, or if the settings allow it."""
    if device is not Device.NPU or wanted.allow_known_bad:
        return None
    known = probe.properties(device)
    architecture = known.get("DEVICE_ARCHITECTURE") or "unknown"
    return problem_on_npu(installed, architecture, known.get("NPU_DRIVER_VERSION"), probe.openvino)


def refusal(found: Standing, *, required: bool) -> str | None:
    """Why a placement is not used, or None. A failure that has expired is no reason."""
    if found.state == "failed":
        return f"its certification {found.reason}"
    if required and found.state not in {"certified", "limited"}:
        return f"require_certified is set, and it is {found.state} ({found.reason}); run: npu-node certify"
    if required and found.passport is not None and found.passport.emulated:
        return "require_certified is set, and its passport is of an emulated NPU"
    return None
