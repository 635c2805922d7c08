"""All checks in the order in which they should be mended."""

from __future__ import annotations

from pathlib import Path

from worker_node.devices.probe import Probe
from worker_node.doctor.files import check_cache, check_model
from worker_node.doctor.finding import Finding, Severity
from worker_node.doctor.kernel import check_kernel, pci_device
from worker_node.doctor.machine import Machine
from worker_node.doctor.userspace import check_userspace


def examine(
    machine: Machine, probe: Probe, *, model: Path, model_problem: str | None, cache: Path
) -> tuple[Finding, ...]:
    """Return a finding for every check, those that found nothing wrong included."""
    npu = pci_device(machine) is not None
    return (
        *check_kernel(machine),
        *check_userspace(machine, probe, npu=npu),
        check_model(model, model_problem),
        *check_cache(cache, probe),
    )


def healthy(findings: tuple[Finding, ...]) -> bool:
    """Whether nothing keeps the NPU from working."""
    return all(finding.severity is not Severity.ERROR for finding in findings)
