"""One certification: the nodes it takes, the checks, and the passport that comes of it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from worker_node import __version__
from worker_node.certify.checks import CHECKS, KINDS, Certification, Plan
from worker_node.certify.nodes import CallFailed, RunningNode
from worker_node.certify.predictions import predictions_for
from worker_node.certify.reference import Reference, read_reference, shipped_reference
from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device
from worker_node.devices.energy import power_source
from worker_node.devices.npu import find_npu, frequency_limits
from worker_node.devices.probe import Probe
from worker_node.doctor.checks import examine
from worker_node.doctor.machine import ExaminedMachine, read_kernel_log
from worker_node.models.directory import MODEL_FILE, InstalledModel
from worker_node.models.passports import (
    CheckResult,
    Efficiency,
    Frequencies,
    Identity,
    Limits,
    Passport,
    Power,
    Rates,
    Verdict,
    now,
)
from worker_node.models.store import ModelStore
from worker_node.serving.build import identity_of, installed_model, known_problem
from worker_node.serving.demanded_faults import faults_of
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings

_DOCTOR_FACTS = (15, 17, 18, 20, 21, 22, 23)
_CPU = PlacementSettings(device=Device.CPU, plugin_config={"INFERENCE_PRECISION_HINT": "f32"})


@dataclass(frozen=True, slots=True)
class Run:
    """What is certified, and how. `reference` is a file that --make-reference wrote."""

    settings: NodeSettings
    wanted: ModelSettings
    device: Device
    probe: Probe
    plan: Plan
    reference: Path | None = None


def certify(run: Run, say: Callable[[str], None]) -> Passport:
    """The passport, not signed yet. Raises ConfigurationError for a model that is not installed, or not of `KINDS`."""
    if unknown := run.plan.only - CHECKS:
        raise ConfigurationError(
            f"--check must be one of {', '.join(sorted(CHECKS))}; got {', '.join(sorted(unknown))}"
        )
    device, wanted = run.device, run.wanted
    installed, identity = _identified(run)
    emulated = identity.emulated
    say(f"{identity.model} on {device.value}{' (emulated)' if emulated else ''}")
    place = next((each for each in wanted.placements or () if each.device is device), PlacementSettings(device=device))
    place = place.model_copy(update={"load": "eager"})

    faults = "; ".join(map(str, faults_of(identity.model, device, run.settings)))
    under_faults = f", with faults on demand: {faults}" if faults else ""

    key = f"{identity.model_hash} {identity.openvino}"
    stored = shipped_reference(identity.model, key) if run.reference is None else read_reference(run.reference, key)

    checks = [_doctor(run)] if device is Device.NPU and not emulated else []
    load = CheckResult(name="load", status="passed", detail="", facts=[8, 11, 14], values={})
    limit, rates, efficiency = None, Rates(), Efficiency()
    with closing(Reference(key, lambda: _start_cpu(run, say), installed.path / MODEL_FILE, stored)) as reference:
        try:
            with closing(RunningNode(wanted, place, run.settings, say)) as node:
                seconds = node.model()["compile"]["seconds"]
                detail = f"loaded and compiled in {seconds} s{under_faults}"[:1000]
                checks.append(load.model_copy(update={"detail": detail, "values": {"seconds": seconds}}))
                predictions = predictions_for(identity.model, installed.quantization, identity.architecture)
                certification = Certification(node, reference, run.plan, say, predictions)
                certification.run()
            checks += certification.checks
            limit, rates = certification.limit, Rates(**certification.rates)
            efficiency = Efficiency(**certification.efficiency)
        except CallFailed as error:
            detail = f"{error.message}{under_faults}"[:1000]
            checks.append(load.model_copy(update={"status": "failed", "detail": detail}))
        origin = reference.origin

    verdict: Verdict = "limited" if any("wrong_from" in check.values for check in checks) else "certified"
    if any(check.status == "failed" for check in checks):
        verdict = "failed"
    elif run.plan.only:
        verdict = "incomplete"

    supply = power_source(run.settings.energy_sysfs)
    frequencies = Frequencies(**frequency_limits(run.settings.npu_sysfs or find_npu()))
    return Passport(
        **asdict(identity),
        verdict=verdict,
        made=now(),
        node=socket.gethostname(),
        version=__version__,
        reference=origin,
        limits=Limits(max_prompt_tokens=limit),
        rates=rates,
        efficiency=efficiency,
        power=Power(source=supply.source, adapter_watts=supply.adapter_watts, npu_mhz=frequencies),
        checks=checks,
    )


def left_out(run: Run) -> str | None:
    """What is known against the model on the device; None if nothing. Raises ConfigurationError as `certify`."""
    installed, identity = _identified(run)
    return None if identity.emulated else known_problem(installed, run.wanted, run.device, run.probe)


def make_reference(run: Run, path: Path, say: Callable[[str], None]) -> None:
    """Write this CPU's answers, for `reference` on other machines. Raises ConfigurationError, CallFailed."""
    installed, identity = _identified(run)
    graph, key = installed.path / MODEL_FILE, f"{identity.model_hash} {identity.openvino}"
    with closing(Reference(key, lambda: _start_cpu(run, say), graph, {})) as reference:
        reference.make()
        reference.save(path)


def _identified(run: Run) -> tuple[InstalledModel, Identity]:
    installed = installed_model(run.wanted, ModelStore(run.settings.model_store), run.settings)
    if installed.kind not in KINDS:
        raise ConfigurationError(
            f"{installed.id} cannot be certified: there are no checks of {installed.kind} models, only of "
            f"{', '.join(sorted(KINDS))}; name the models to certify"
        )
    return installed, identity_of(installed, run.wanted, run.device, run.probe, run.settings)


def _start_cpu(run: Run, say: Callable[[str], None]) -> RunningNode:
    say("  starting a node on the CPU for comparison")
    without = {"npu_emulation": False, "faults": None}
    return RunningNode(run.wanted, _CPU, run.settings.model_copy(update=without), say)


def _doctor(run: Run) -> CheckResult:
    found = examine(
        ExaminedMachine(kernel_log=read_kernel_log()), run.probe, cache=run.settings.compile_cache.expanduser()
    )
    wrong = [f"{finding.id}: {finding.found}" for finding in found if finding.severity == "error"]
    return CheckResult(
        name="doctor",
        status="failed" if wrong else "passed",
        detail="; ".join(wrong)[:1000] if wrong else f"{len(found)} findings, none an error",
        facts=list(_DOCTOR_FACTS),
        values={},
    )
