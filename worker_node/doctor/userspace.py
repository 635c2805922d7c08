"""The side of user space: Level Zero, the user-mode driver, the compiler, OpenVINO."""

from __future__ import annotations

from worker_node.devices.probe import Probe
from worker_node.doctor.finding import Finding, error, ok
from worker_node.doctor.machine import ExaminedMachine

# Released together by github.com/intel/linux-npu-driver; the versions of one release are equal.
_PACKAGES = ("intel-driver-compiler-npu", "intel-fw-npu", "intel-level-zero-npu")
_RELEASE = "github.com/intel/linux-npu-driver/releases"


def check_userspace(machine: ExaminedMachine, probe: Probe, *, npu: bool) -> list[Finding]:
    """`npu` says whether there is a device to drive; `probe` is what OpenVINO sees. In the order of dependence."""
    findings = []
    if npu:
        findings = [_loader(machine), _driver(machine), _compiler(machine), *_release(machine)]
    return [*findings, _openvino(probe, npu=npu)]


def _loader(machine: ExaminedMachine) -> Finding:
    found = machine.library("libze_loader.so*")
    if found is None:
        fix = f"apt install libze1 (or level-zero from {_RELEASE})"
        return error("level-zero-loader", "libze_loader.so.1 is not installed", fix)
    return ok("level-zero-loader", found.name)


def _driver(machine: ExaminedMachine) -> Finding:
    found = machine.library("libze_intel_npu.so*", "libze_intel_vpu.so*")
    if found is None:
        fix = f"install the package intel-level-zero-npu of the newest release of {_RELEASE}"
        return error("user-mode-driver", "the user-mode driver libze_intel_npu.so is not installed", fix)
    return ok("user-mode-driver", found.name)


def _compiler(machine: ExaminedMachine) -> Finding:
    found = machine.library("libnpu_driver_compiler.so*")
    if found is None:
        fix = f"install the package intel-driver-compiler-npu of the release that the driver is of ({_RELEASE})"
        return error("compiler", "libnpu_driver_compiler.so is not installed: no model can be compiled", fix)
    return ok("compiler", found.name)


def _release(machine: ExaminedMachine) -> list[Finding]:
    versions = machine.package_versions(*_PACKAGES)
    told = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    if len(set(versions.values())) > 1:
        fix = f"install {', '.join(_PACKAGES)} of one release of {_RELEASE}, then reboot"
        return [error("firmware-mismatch", f"firmware, driver and compiler are of different releases: {told}", fix)]
    return [ok("firmware-mismatch", f"one release: {told}")] if versions else []


def _openvino(probe: Probe, *, npu: bool) -> Finding:
    if probe.error is not None or probe.openvino is None:
        return error(
            "openvino", f"OpenVINO cannot list its devices: {probe.error}", "pip install --force-reinstall openvino"
        )
    device = probe.find("NPU")
    if device is None:
        seen = ", ".join(d.name for d in probe.devices) or "none"
        fix = "mend the errors above, first to last; then see npu-node doctor again" if npu else "see npu-present"
        return error("openvino", f"OpenVINO {probe.openvino} sees no NPU, only {seen}", fix)
    if device.properties.get("NPU_COMPILER_VERSION") is None:
        fix = f"install the package intel-driver-compiler-npu of the release that the driver is of ({_RELEASE})"
        return error("openvino", "OpenVINO sees the NPU and no compiler for it", fix)
    driver = device.properties.get("NPU_DRIVER_VERSION")
    return ok("openvino", f"OpenVINO {probe.openvino} sees the NPU, driver {driver}")
