"""One certification: the nodes it takes, the checks, and the passport that comes of it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from worker_node import __version__
from worker_node.certify.checks import Certification, Plan
from worker_node.certify.nodes import CallFailed, RunningNode
from worker_node.certify.reference import Reference, read_reference, shipped_reference
from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device
from worker_node.devices.probe import Probe
from worker_node.doctor.checks import examine
from worker_node.doctor.machine import ExaminedMachine
from worker_node.models.directory import MODEL_FILE, InstalledModel
from worker_node.models.passports import CheckResult, Identity, Limits, Passport, Rates, Verdict, now
from worker_node.models.store import ModelStore
from worker_node.serving.build import installed_model
from worker_node.serving.certified import identity_of
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings

_LOAD_FACTS = (8, 11, 14)
_DOCTOR_FACTS = (15, 17, 18, 20, 21, 22, 23)
_CPU = PlacementSettings(device=Device.CPU, plugin_config={"INFERENCE_PRECISION_HINT": "f32"})


@dataclass(frozen=True, slots=True)
class Run:
    """What is certified, and how. `flags` are those of `serve` that name the settings file."""

    settings: NodeSettings
    wanted: ModelSettings
    device: Device
    probe: Probe
    plan: Plan
    flags: tuple[str, ...] = ()
    reference: Path | None = None


def certify(run: Run, say: Callable[[str], None]) -> Passport:
    """The passport, not signed yet. Raises ConfigurationError for a model that is not installed."""
    device, wanted = run.device, run.wanted
    installed, identity = _identified(run)
    emulated = identity.emulated
    say(f"{identity.model} on {device.value}{' (emulated)' if emulated else ''}")
    place = next((each for each in wanted.placements or () if each.device is device), PlacementSettings(device=device))
    place = place.model_copy(update={"load": "eager"})
    faults = {} if run.settings.faults is None else {"NPU_NODE_FAULTS": str(run.settings.faults)}

    def start() -> RunningNode:
        return RunningNode(wanted, place, say, faults, run.flags)

    key = _key(identity)
    stored = shipped_reference(identity.model, key) if run.reference is None else read_reference(run.reference, key)
    checks = [_doctor(run)] if device is Device.NPU and not emulated else []
    limit, rates = None, Rates()
    with Reference(key, lambda: _start_cpu(run, say), installed.path / MODEL_FILE, stored) as reference:
        try:
            node = start()
        except CallFailed as error:
            failed = CheckResult(
                name="load", status="failed", detail=error.message[:1000], facts=list(_LOAD_FACTS), values={}
            )
            checks.append(failed)
        else:

            def restart() -> RunningNode:
                nonlocal node
                node.stop()
                node = start()
                return node

            try:
                seconds = node.model()["compile"]["seconds"]
                checks.append(
                    CheckResult(
                        name="load",
                        status="passed",
                        detail=f"loaded and compiled in {seconds} s",
                        facts=list(_LOAD_FACTS),
                        values={"seconds": seconds},
                    )
                )
                certification = Certification(node, reference, restart, run.plan, say)
                certification.run()
                checks += certification.checks
                limit, rates = certification.limit, Rates(**certification.rates)
            finally:
                node.stop()
        origin = reference.origin
    if unknown := run.plan.only - {check.name for check in checks}:
        raise ConfigurationError(f"--check must name a check of docs/certify.md, got {', '.join(sorted(unknown))}")
    return Passport(
        **asdict(identity),
        verdict=_verdict(run.plan, checks, limit),
        made=now(),
        node=socket.gethostname(),
        version=__version__,
        reference=origin,
        limits=Limits(max_prompt_tokens=limit),
        rates=rates,
        checks=checks,
    )


def _verdict(plan: Plan, checks: Sequence[CheckResult], limit: int | None) -> Verdict:
    if any(check.status == "failed" for check in checks):
        return "failed"
    return "incomplete" if plan.only else "limited" if limit else "certified"


def make_reference(run: Run, path: Path, say: Callable[[str], None]) -> None:
    """Write this CPU's answers, for `reference` on other machines. Raises ConfigurationError, CallFailed."""
    installed, identity = _identified(run)
    with Reference(_key(identity), lambda: _start_cpu(run, say), installed.path / MODEL_FILE, {}) as reference:
        reference.make()
        reference.save(path)


def _identified(run: Run) -> tuple[InstalledModel, Identity]:
    installed = installed_model(run.wanted, ModelStore(run.settings.model_store), run.settings)
    emulated = run.device is Device.NPU and run.settings.npu_emulation
    return installed, identity_of(installed, run.wanted, run.device, run.probe, emulated=emulated)


def _key(identity: Identity) -> str:
    """What a reference holds for: the weights and OpenVINO."""
    return f"{identity.model_hash} {identity.openvino}"


def _start_cpu(run: Run, say: Callable[[str], None]) -> RunningNode:
    say("  starting a node on the CPU for comparison")
    return RunningNode(run.wanted, _CPU, say, {"NPU_NODE_NPU_EMULATION": "false"}, run.flags)


def _doctor(run: Run) -> CheckResult:
    """What `npu-node doctor --require npu` finds."""
    found = examine(ExaminedMachine(kernel_log=None), run.probe, cache=run.settings.compile_cache.expanduser())
    wrong = [f"{finding.id}: {finding.found}" for finding in found if finding.severity == "error"]
    return CheckResult(
        name="doctor",
        status="failed" if wrong else "passed",
        detail="; ".join(wrong)[:1000] if wrong else f"{len(found)} findings, none an error",
        facts=list(_DOCTOR_FACTS),
        values={},
    )
