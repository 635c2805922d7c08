"""All checks in the order in which problems should be fixed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from worker_node.devices.probe import Probe
from worker_node.doctor.files import check_cache, check_model
from worker_node.doctor.finding import Finding, Severity, error, ok
from worker_node.doctor.kernel import check_kernel, pci_device
from worker_node.doctor.machine import ExaminedMachine
from worker_node.doctor.userspace import check_userspace


def examine(
    machine: ExaminedMachine, probe: Probe, *, model: Path, model_problem: str | None, cache: Path
) -> tuple[Finding, ...]:
    """Return a finding for every check, those that found nothing wrong included."""
    npu = pci_device(machine) is not None
    return (
        *check_kernel(machine),
        *check_userspace(machine, probe, npu=npu),
        check_model(model, model_problem),
        *check_cache(cache, probe),
    )


def for_any_device(findings: Iterable[Finding], probe: Probe) -> tuple[Finding, ...]:
    """The findings for a node that serves on whatever device there is: first whether its CPU can.

    What the NPU lacks is then a warning: the node serves without it.
    """
    lesser = (
        replace(finding, severity=Severity.WARNING) if finding.severity is Severity.ERROR else finding
        for finding in findings
    )
    return check_cpu(probe), *lesser


def check_cpu(probe: Probe) -> Finding:
    """Whether OpenVINO can run models on the CPU."""
    cpu = probe.find("CPU")
    if probe.error is not None or cpu is None:
        reason = probe.error or "it lists no CPU"
        return error("cpu", f"OpenVINO cannot use this machine: {reason}", "pip install --force-reinstall openvino")
    name = cpu.properties.get("FULL_DEVICE_NAME") or "CPU"
    return ok("cpu", f"this machine can serve on its CPU ({name}, OpenVINO {probe.openvino})")


def healthy(findings: tuple[Finding, ...]) -> bool:
    """Whether no finding is an error."""
    return all(finding.severity is not Severity.ERROR for finding in findings)
