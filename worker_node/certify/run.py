"""One certification: the nodes it takes, the checks, and the passport that comes of it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from worker_node import __version__
from worker_node.certify.checks import Certification, Check, Plan
from worker_node.certify.nodes import CallFailed, Reference, RunningNode
from worker_node.certify.score import Scorer
from worker_node.core.types import Device
from worker_node.devices.probe import Probe
from worker_node.doctor.checks import examine
from worker_node.doctor.machine import ExaminedMachine
from worker_node.models.passports import CheckResult, Limits, Passport, Rates, now
from worker_node.models.store import ModelStore
from worker_node.serving.build import installed_model
from worker_node.serving.certified import identity_of
from worker_node.settings import ModelSettings, NodeSettings

# A placement that failed before is certified again all the same, and one that has no passport yet is what is certified.
_UNCERTIFIED = {"NPU_NODE_PASSPORTS": "/nonexistent/passports", "NPU_NODE_REQUIRE_CERTIFIED": "false"}


@dataclass(frozen=True, slots=True)
class Run:
    """What is certified, and how. `flags` are those of `serve` that name the settings file."""

    settings: NodeSettings
    wanted: ModelSettings
    device: str
    probe: Probe
    plan: Plan
    flags: tuple[str, ...] = ()
    reference: Path | None = None
    make_reference: Path | None = None


def certify(run: Run, say: Callable[[str], None]) -> Passport:
    """The passport, not yet signed. Raises ConfigurationError for a model that is not installed."""
    device, wanted = Device(run.device), run.wanted
    installed = installed_model(wanted, ModelStore(run.settings.model_store), run.settings)
    emulated = device is Device.NPU and run.settings.npu_emulation
    identity = identity_of(installed, wanted, device, run.probe, emulated=emulated)
    say(f"{identity.model} on {device.value}{' (emulated)' if emulated else ''}")

    own = dict(_UNCERTIFIED)
    if run.settings.faults is not None:
        own["NPU_NODE_FAULTS"] = str(run.settings.faults)

    def start() -> RunningNode:
        return RunningNode(wanted, device, say, own, run.flags)

    def start_reference() -> RunningNode:
        say("  the CPU that it is compared with is started")
        cpu = _UNCERTIFIED | {"NPU_NODE_NPU_EMULATION": "false"}
        return RunningNode(wanted.model_copy(update={"placements": None}), Device.CPU, say, cpu, run.flags)

    key = f"{identity.model_hash} {identity.openvino} {identity.settings_hash}"
    reference = Reference(start_reference, run.reference, key)
    checks = [_doctor(run, device)] if device is Device.NPU and not emulated else []
    certification: Certification | None = None
    scorer = Scorer(installed.path)
    try:
        try:
            node = start()
        except CallFailed as error:
            checks.append(Check("load", "failed", error.message[:500], (8, 11, 14)))
        else:

            def restart() -> RunningNode:
                nonlocal node
                node.stop()
                node = start()
                return node

            try:
                seconds = node.model()["compile"]["seconds"]
                checks.append(Check("load", "passed", f"ready, loaded in {seconds} s", (8, 11, 14)))
                certification = Certification(node, reference, scorer, restart, run.plan, say)
                certification.run()
                checks += certification.checks
            finally:
                node.stop()
        if run.make_reference is not None:
            reference.save(run.make_reference)
    finally:
        reference.close()
        scorer.close()
    limit = certification.limit if certification else None
    failed = any(check.status == "failed" for check in checks)
    return Passport(
        **asdict(identity),
        verdict="failed" if failed else "limited" if limit else "certified",
        made=now(),
        node=socket.gethostname(),
        version=__version__,
        reference="this CPU" if run.reference is None or reference.asked_here else "stored",
        limits=Limits(max_prompt_tokens=limit),
        rates=Rates(**(certification.rates if certification else {})),
        checks=[CheckResult(**check.as_dict()) for check in checks],
    )


def _doctor(run: Run, device: Device) -> Check:
    """What `npu-node doctor --require npu` finds."""
    found = examine(ExaminedMachine(kernel_log=None), run.probe, cache=run.settings.compile_cache.expanduser())
    wrong = [f"{finding.id}: {finding.found}" for finding in found if finding.severity == "error"]
    if wrong:
        return Check("doctor", "failed", "; ".join(wrong)[:900], (15, 17, 18, 20, 21, 22, 23))
    return Check(
        "doctor", "passed", f"{len(found)} findings on the {device.value}, none an error", (17, 18, 20, 21, 22, 23)
    )
