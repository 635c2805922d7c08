"""The checks: the kernel's side of the NPU, its user space, and the node's own files; `examine` runs them in order.

What is known of Intel's NPUs is here, and of the releases of their driver in `driver_pairs.toml`.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from worker_node.core.operating_system import WINDOWS, pci_drivers
from worker_node.core.types import Device
from worker_node.devices.energy import EnergyCounter, energy_counter, power_source
from worker_node.devices.npu import MAKE_ROOM, NPU_LIMITS, RELOAD_DRIVER, find_npu, frequency_limits, version_in
from worker_node.devices.probe import Probe
from worker_node.doctor.machine import ExaminedMachine, Finding, Severity, error, ok, warning

# Name and generation by PCI device id: the one list of ids. Rules about models know an NPU by the architecture that
# OpenVINO reports, as 3720. A test compares roles, docs and these architectures with it.
NPUS = {
    "7d1d": ("Meteor Lake", "37xx"),
    "ad1d": ("Arrow Lake", "37xx"),
    "643e": ("Lunar Lake", "40xx"),
    "b03e": ("Panther Lake", "50xx"),
    "fd3e": ("Wildcat Lake", "50xx"),
    "d71d": ("Nova Lake", "60xx"),
}
RELEASES = "github.com/intel/linux-npu-driver/releases"

_PCI = "sys/bus/pci/devices"
# Processing accelerators. Intel's NPUs have this class, and so have some of its FPGA cards.
_CLASS = "0x1200"
_UPDATE = (
    "update the node (docs/npu-machine.md lists the NPUs that it knows); until then the other checks and npu-node "
    "certify say what this one can do"
)
_DRIVER_SINCE = (6, 3)
_COUNTER_SINCE = (6, 11)
_NODE = "dev/accel"
_FIRMWARE = ("lib/firmware", "usr/lib/firmware", "lib/firmware/updates", "usr/lib/firmware/updates")
_GIVE_DEVICE = "--device /dev/accel/accel0 --group-add $(stat -c %g /dev/accel/accel0), read on the host"
_FIRMWARE_FIX = (
    "install the NPU's firmware: apt install firmware-intel-misc (Debian, non-free-firmware), or intel-fw-npu of the "
    f"same linux-npu-driver release as the other two packages; then {RELOAD_DRIVER}"
)


def pci_device(machine: ExaminedMachine) -> tuple[str, str] | None:
    """Address and device id of the NPU, one of `NPUS` if there is one; None without an Intel accelerator."""
    found = []
    for path in machine.find(_PCI, "*"):
        device = f"{_PCI}/{path.name}"
        identity = (machine.read(f"{device}/device") or "").removeprefix("0x")
        kind = machine.read(f"{device}/class") or ""

        if machine.read(f"{device}/vendor") != "0x8086":
            continue
        if identity in NPUS or kind.startswith(_CLASS):
            found.append((path.name, identity))

    return min(found, key=lambda npu: npu[1] not in NPUS, default=None)


def check_kernel(machine: ExaminedMachine) -> Iterator[Finding]:
    """Everything up to the device node, in the order in which one thing needs the other."""
    yield _version(machine)
    npu = pci_device(machine)
    if npu is None and "microsoft" in machine.kernel_release().lower():
        fix = "run the node on Windows itself (docs/install.md#windows), or on a Linux that is started without Windows"
        yield error("npu-present", "WSL2 has no device node for an NPU", fix)
        return
    if npu is None:
        known = ", ".join(sorted(NPUS))
        fix = (
            "if the processor has one (docs/npu-machine.md), enable it in the firmware setup; in a virtual machine "
            "pass the device through (usually 0000:00:0b.0); to try the node without one set NPU_NODE_NPU_EMULATION=1"
        )
        yield error("npu-present", f"no Intel NPU on the PCI bus (8086: {known})", fix)
        return

    address, device = npu
    name, generation = NPUS.get(device, ("", ""))
    if not name:
        found = (
            f"8086:{device} at {address} is an Intel accelerator that this release does not know, such as a newer NPU"
        )
        yield warning("npu-present", found, _UPDATE)
    else:
        yield ok("npu-present", f"{name} NPU 8086:{device} at {address}")
    yield _driver(machine, address)
    if generation and not machine.in_container():  # else it is the host's
        places = (machine.find(f"{at}/intel/vpu", f"vpu_{generation}_v*.bin*") for at in _FIRMWARE)
        if firmware := next(filter(None, places), None):
            directory = firmware[-1].parent.relative_to(machine.root)
            yield ok("firmware-file", f"{firmware[-1].name} in /{directory}")
        else:
            yield error("firmware-file", f"no firmware vpu_{generation}_v*.bin for this NPU", _FIRMWARE_FIX)
    yield from _log(machine)
    yield from _node(machine)


def _version(machine: ExaminedMachine) -> Finding:
    release = machine.kernel_release()
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        return warning("kernel-version", f"the kernel's release {release!r} cannot be read", "see uname -r")
    version = int(match[1]), int(match[2])
    fix = "install kernel 6.11 or newer (Debian 12: apt install -t bookworm-backports linux-image-amd64) and reboot"
    if version < _DRIVER_SINCE:
        return error("kernel-version", f"kernel {release} has no driver for NPUs", fix)
    if version < _COUNTER_SINCE:
        return error("kernel-version", f"kernel {release} has no busy counter: nothing proves that the NPU ran", fix)
    return ok("kernel-version", f"kernel {release}")


def _driver(machine: ExaminedMachine, address: str) -> Finding:
    bound = machine.link_name(f"{_PCI}/{address}/driver")
    if bound == "intel_vpu":
        return ok("kernel-driver", "intel_vpu drives the device")
    if bound is not None:
        fix = f"free it for this system: echo {address} | sudo tee /sys/bus/pci/drivers/{bound}/unbind; {RELOAD_DRIVER}"
        return error("kernel-driver", f"{bound} holds the device, as for a virtual machine", fix)
    if machine.exists("sys/module/intel_vpu"):
        return error(
            "kernel-driver",
            "intel_vpu is loaded and does not drive the device",
            "sudo dmesg | grep -i vpu says why; where the NPU is newer than the kernel, a newer kernel; "
            f"then {RELOAD_DRIVER}",
        )
    release = machine.kernel_release()
    if "cloud" in release:
        fix = "this kernel flavour leaves it out: apt install linux-image-amd64, remove the cloud kernel, and reboot"
    else:
        fix = "sudo modprobe intel_vpu; if there is no such module, install the distribution's full kernel and reboot"
    return error("kernel-driver", f"the device has no driver: intel_vpu is not loaded in kernel {release}", fix)


def _log(machine: ExaminedMachine) -> Iterator[Finding]:
    log = machine.kernel_log
    if log is None:
        fix = "sudo dmesg | grep -i -e vpu -e npu"
        yield warning("kernel-log", "the kernel's log cannot be read by this user", fix)
        return
    text = "\n".join(line for line in log.splitlines() if "vpu" in line.lower() or "MAPPED_INFERENCE" in line)

    mismatch = re.search(r"MAPPED_INFERENCE_VERSION is NOT compatible", text)
    failed_boot = re.search(r"boot[^\n]*-110\b", text)
    lost = re.search(r"DEVICE_LOST|TDR|[Rr]ecover(ing|y)", text)
    if mismatch:
        found = "the log says that firmware and compiler do not fit each other"
        yield error("firmware-compiler", found, _FIRMWARE_FIX)
    if failed_boot:
        fix = (
            f"cold-restart the machine (power off); {RELOAD_DRIVER}. In a virtual machine under ESXi it is known to "
            "fail so, and for KVM nobody has confirmed that it works: run the node on the host"
        )
        yield error("firmware-boot", "the firmware did not boot (-110)", fix)
    if lost:
        yield warning("device-lost", "the log reports a lost or reset NPU", RELOAD_DRIVER)
    if not (mismatch or failed_boot or lost):
        yield ok("kernel-log", "nothing against the NPU in the kernel's log")


def _node(machine: ExaminedMachine) -> Iterator[Finding]:
    nodes = [path.name for path in machine.find(_NODE, "accel*")]
    if not nodes:
        fix = "the kernel's driver makes it: fix the errors above, then reboot"
        if machine.in_kubernetes():
            fix = "give the container the resource npu.intel.com/accel: 1 (Intel's device plugin; docs/kubernetes.md)"
        elif machine.in_container():
            fix = f"start the container with {_GIVE_DEVICE}"
        yield error("device-node", "no /dev/accel/accel*", fix)
        return

    ours = find_npu(machine.root / "sys/class/accel").parent.name
    name = ours if ours in nodes else nodes[0]
    yield ok("device-node", f"/{_NODE}/{name}")
    yield _access(machine, f"{_NODE}/{name}")
    path = f"sys/class/accel/{name}/device/npu_busy_time_us"
    value = machine.read(path)
    if value is not None and value.isdecimal():
        yield ok("busy-counter", f"/{path} reads {value}")
    else:
        why = "is not there" if value is None else "holds no number"
        fix = "kernel 6.11 or newer has it"
        yield error("busy-counter", f"/{path} {why}: nothing can prove that the NPU ran", fix)
    yield _frequencies(machine.root / f"sys/class/accel/{name}/device")
    yield _power(machine)
    counter = energy_counter(Device.NPU, sysfs=machine.root / "sys/class")
    said = f"replies name no joules: {counter} (docs/npu.md)"
    if isinstance(counter, EnergyCounter):
        said = f"{counter.path} can be read: replies name the joules of the NPU"
    yield ok("energy-counter", said)


def _frequencies(device: Path) -> Finding:
    limits = {name: mhz for name, mhz in frequency_limits(device).items() if mhz is not None}
    shown = ", ".join(f"{name} {mhz}" for name, mhz in sorted(limits.items())) or "the kernel does not say"
    if limits.get("set_max", 0) < limits.get("max", 0) and "set_max" in limits:
        fix = f"echo {limits['max']} | sudo tee {device}/freq/set_max_freq"
        return warning("npu-frequency", f"the NPU may not run as fast as it can (MHz: {shown})", fix)
    return ok("npu-frequency", f"MHz: {shown}")


def _power(machine: ExaminedMachine) -> Finding:
    """What supplies the machine: with a weak adapter, and on a battery, an NPU is half as fast (docs/npu-facts.md)."""
    supply = power_source(machine.root / "sys/class")
    watts = "" if supply.adapter_watts is None else f" of {supply.adapter_watts:g} W"
    if supply.source == "battery":
        return warning("power-source", "the machine runs on its battery: speeds are lower", "connect its adapter")
    if supply.discharging:
        fix = "connect the adapter that came with the machine, without a dock"
        return warning("power-source", f"the battery discharges although an adapter{watts} is connected", fix)
    named = f"an adapter{watts}" if supply.source else "the kernel names no adapter and no battery"
    return ok("power-source", named)


def _access(machine: ExaminedMachine, node: str) -> Finding:
    group, problem = machine.group_of(node), machine.open_error(node)
    if problem is not None and problem.errno == errno.EMFILE:
        return error("device-access", f"/{node} cannot be opened: {NPU_LIMITS}", MAKE_ROOM)
    if machine.in_container() and not machine.may_use(node):
        what = f"this container may not open /{node}, which is for the group {group}"
        fix = f"start the container with {_GIVE_DEVICE}, not as a volume"
        if machine.in_kubernetes():
            fix = (
                "npu.intel.com/accel: 1 as a resource, not a volume, and the group's number of the host in "
                "supplementalGroups (the chart: deviceGroup)"
            )
        return error("device-access", what, fix)
    if group in {None, "root"}:
        fix = (
            'sudo groupadd -f -r render; echo \'SUBSYSTEM=="accel", KERNEL=="accel*", GROUP="render", MODE="0660"\' | '
            "sudo tee /etc/udev/rules.d/70-npu.rules; sudo udevadm control --reload; sudo udevadm trigger "
            f"--subsystem-match=accel; sudo usermod -a -G render {machine.user()}; then log in again"
        )
        if machine.may_use(node):
            return warning("device-access", f"/{node} belongs to no group: only root may use it", fix)
        return error("device-access", f"/{node} belongs to no render group and this user may not open it", fix)
    if machine.may_use(node):
        return ok("device-access", f"this user may open /{node} (group {group})")
    return error(
        "device-access",
        f"this user may not open /{node}, which is for the group {group}",
        f"sudo usermod -a -G {group} {machine.user()}; then log in again (a service: SupplementaryGroups={group})",
    )


# Released together by github.com/intel/linux-npu-driver; the versions of one release are equal.
_DRIVER_PACKAGE = "intel-level-zero-npu"
_PACKAGES = ("intel-driver-compiler-npu", "intel-fw-npu", _DRIVER_PACKAGE)
_COMPILER_FIX = f"install the package intel-driver-compiler-npu of the release that the driver is of ({RELEASES})"


def check_userspace(machine: ExaminedMachine, probe: Probe, *, npu: bool) -> Iterator[Finding]:
    """`npu` says whether there is a device to drive; `probe` is what OpenVINO sees. In the order of dependence."""
    if npu:
        newest = f"install the package {_DRIVER_PACKAGE} of the newest release of {RELEASES}"
        old, new = machine.library("libze_intel_vpu.so*"), machine.library("libze_intel_npu.so*")
        loader = f"apt install libze1 (or level-zero from {RELEASES})"
        yield _library("level-zero-loader", "libze_loader.so", machine.library("libze_loader.so*"), loader)
        yield _library("user-mode-driver", "libze_intel_npu.so", new or old, newest)
        if old is not None and new is not None:
            # The driver's library of before 1.16, which had another name: the loader may take it.
            fix = f"sudo rm {old.parent}/libze_intel_vpu.so*; sudo ldconfig"
            found = f"{old.name} of an older driver is beside {new.name} (linux-npu-driver#107)"
            yield warning("stale-driver", found, fix)
        compiler = "libnpu_driver_compiler.so"
        yield _library("compiler", compiler, machine.library(f"{compiler}*"), _COMPILER_FIX)
        versions = machine.package_versions(*_PACKAGES)
        listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        if len(set(versions.values())) > 1:
            fix = f"install {', '.join(_PACKAGES)} of one release of {RELEASES}, then reboot"
            yield error("firmware-mismatch", f"firmware, driver and compiler are of different releases: {listed}", fix)
        elif versions:
            yield ok("firmware-mismatch", f"one release: {listed}")
        release = machine.package_versions(_DRIVER_PACKAGE).get(_DRIVER_PACKAGE)
        if release is not None:
            _, identity = pci_device(machine) or ("", "")
            name, _ = NPUS.get(identity, ("", ""))
            yield from check_driver(release, name, machine, probe.openvino)
    yield _openvino(probe, npu=npu)


@cache
def known_drivers() -> dict[str, list[dict[str, Any]]]:
    file = files("worker_node.doctor").joinpath("driver_pairs.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def check_driver(driver: str, npu: str, machine: ExaminedMachine, openvino: str | None) -> list[Finding]:
    known, kernel, system = known_drivers(), machine.kernel_release(), machine.system()
    here = re.match(r"\d+\.\d+", openvino or "")
    findings = []

    for row in known["first"]:
        first = row["driver"]
        if row["npu"] == npu and version_in(driver, f"<{first}"):
            found = f"driver {driver} does not know {npu}: {first} is the first that does ({row['source']})"
            findings.append(warning("driver-npu", found, f"install a newer release ({RELEASES})"))

    for row in known["verified"]:
        if not version_in(driver, row["driver"]):
            continue
        if system not in row["systems"] or not version_in(kernel, row["kernel"]):
            found = (
                f"driver {driver} is verified with {' and '.join(row['systems'])} and kernel {row['kernel']}, "
                f"and here are {system or 'an unknown system'} and kernel {kernel} ({row['source']})"
            )
            fix = f"none if npu-node certify passes; else a release that names this system ({RELEASES})"
            findings.append(warning("driver-kernel", found, fix))
        own = row.get("openvino")
        if own is not None and here is not None and version_in(own, f"<{here[0]}"):
            found = f"driver {driver} was made with OpenVINO {own}, and here is {here[0]} ({row['source']})"
            fix = f"none if npu-node certify passes; else a newer release of the driver ({RELEASES})"
            findings.append(warning("driver-openvino", found, fix))

    for row in known["problem"]:
        if version_in(driver, row["driver"]) and version_in(kernel, row["kernel"]):
            found = f"driver {driver} on kernel {kernel}: {row['problem']} ({row['source']})"
            fix = f"a newer kernel; when it happens: {RELOAD_DRIVER}"
            findings.append(warning("driver-kernel", found, fix))

    return findings or [ok("driver-kernel", f"nothing is known against driver {driver} on kernel {kernel}")]


def _library(check: str, name: str, found: Path | None, fix: str) -> Finding:
    return error(check, f"{name} is not installed", fix) if found is None else ok(check, found.name)


def _openvino(probe: Probe, *, npu: bool, compiler: str = _COMPILER_FIX) -> Finding:
    if probe.error is not None or probe.openvino is None:
        return error(
            "openvino", f"OpenVINO cannot list its devices: {probe.error}", "pip install --force-reinstall openvino"
        )

    device = probe.find("NPU")
    if device is None:
        seen = ", ".join(d.name for d in probe.devices) or "none"
        fix = "fix the errors above, first to last; then run npu-node doctor again" if npu else "see npu-present"
        return error("openvino", f"OpenVINO {probe.openvino} sees no NPU, only {seen}", fix)
    if device.properties.get("NPU_COMPILER_VERSION") is None:
        return error("openvino", "OpenVINO sees the NPU and no compiler for it", compiler)
    driver = device.properties.get("NPU_DRIVER_VERSION")
    return ok("openvino", f"OpenVINO {probe.openvino} sees the NPU, driver {driver}")


# The page of all versions, of the installer and its release notes.
_WINDOWS_DRIVER = "https://www.intel.com/content/www/us/en/download/794734/intel-npu-driver-windows.html"
_WINDOWS_FIX = f"install Intel's NPU driver ({_WINDOWS_DRIVER}), then restart Windows"


@dataclass(frozen=True, slots=True)
class WindowsNpu:
    """An NPU that Windows has found: its PCI device id, and version and date of its driver where one is installed."""

    device: str
    driver: str | None = None
    date: str | None = None


def check_windows(npu: WindowsNpu | None, probe: Probe) -> Iterator[Finding]:
    """The NPU as Windows and OpenVINO see it; firmware and compiler are parts of the driver there."""
    if npu is None and probe.find("NPU") is not None:
        yield warning("npu-present", "OpenVINO sees an NPU that this release does not know", _UPDATE)
    elif npu is None:
        fix = (
            "if the processor has one (docs/npu-machine.md), enable it in the UEFI setup and look for it in Device "
            "Manager; to try the node without one set NPU_NODE_NPU_EMULATION=1"
        )
        yield error("npu-present", "Windows lists no Intel NPU", fix)
    else:
        name, _ = NPUS[npu.device]
        yield ok("npu-present", f"{name} NPU 8086:{npu.device}")
        yield _windows_driver(name, npu)
        found = "the node reads no busy counter on Windows: nothing can prove that the NPU ran"
        fix = "serve on Linux where requests require the NPU's proof (npu_require_proof, docs/install.md#windows)"
        yield warning("busy-counter", found, fix)
    yield _openvino(probe, npu=npu is not None, compiler=_WINDOWS_FIX)


def _windows_driver(name: str, npu: WindowsNpu) -> Finding:
    if npu.driver is None:
        return error("windows-driver", "Windows has no driver for the NPU", _WINDOWS_FIX)
    # Month, day and year.
    date = re.fullmatch(r"(\d+)-(\d+)-(\d{4})", npu.date or "")
    found = f"driver {npu.driver}" + (f" of {date[3]}-{date[1]:>02}-{date[2]:>02}" if date else "")
    for row in known_drivers()["windows"]:
        if version_in(npu.driver, row["driver"]) and name == row["npu"]:
            return error("windows-driver", f"{found}: {row['problem']} ({row['source']})", _WINDOWS_FIX)
    return ok("windows-driver", found)


def _owned(path: Path) -> str:
    """The start of a fix: what lets this user write to `path`."""
    return f"let this user write to {path}" if WINDOWS else f"sudo chown -R $USER {path}"


def _writable(root: Path) -> bool:
    """Whether a file can be made there, shown by one that is gone at once: root has the right to /proc, too."""
    try:
        tempfile.TemporaryFile(dir=next(path for path in (root, *root.parents) if path.exists())).close()
    except OSError:
        return False
    return True


def check_models(store: Path, problems: Mapping[str, tuple[str, str] | None]) -> Iterator[Finding]:
    """The store, and for each configured model what keeps it from being served with the fix, None if nothing does."""
    if _writable(store):
        yield ok("model-store", f"{store} can be written")
    else:
        fix = f"{_owned(store)}, run pull as its owner, or set model_store to another directory"
        yield warning("model-store", f"{store} cannot be written by this user: it can pull no model", fix)
    wrong = warning if None in problems.values() else error
    for name, problem in problems.items():
        yield ok("model-files", f"{name} is there") if problem is None else wrong("model-files", *problem)


def check_secret(file: Path) -> Finding:
    if not os.access(file, os.R_OK):
        fix = f"correct its setting, or {_owned(file)}"
        return error("key-files", f"{file} is missing, or closed to this user", fix)
    if WINDOWS:
        return ok("key-files", f"this user can read {file}; who else can is not examined")
    if file.stat().st_mode & 0o007:
        return warning("key-files", f"{file} may be read or written by every user", f"chmod o= {file}")
    return ok("key-files", f"{file} is for its owner and group")


def check_port(host: str, port: int, *, answered: bool) -> Finding:
    """Whether a node can listen there; `answered`: one does."""
    if answered:
        return ok("port", f"a node answers on port {port}")
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as problem:
        reason = str(problem.strerror).partition(" (while")[0]
        shown = f"ss -ltnp 'sport = :{port}'"
        if WINDOWS:
            shown = f"Get-NetTCPConnection -State Listen -LocalPort {port}"
        fix = f"{shown} shows what holds it; or set another host, or a port from 1024 on"
        return error("port", f"{host}, port {port} cannot be bound: {reason}", fix)
    return ok("port", f"{host}, port {port} is free")


def examine(machine: ExaminedMachine, probe: Probe, *, cache: Path) -> tuple[Finding, ...]:
    """Return a finding for every check of the NPU, those that found nothing wrong included."""
    if WINDOWS:
        listed = (WindowsNpu(*device) for device in pci_drivers("8086"))
        found = check_windows(next((npu for npu in listed if npu.device in NPUS), None), probe)
    else:
        npu = pci_device(machine) is not None
        found = itertools.chain(check_kernel(machine), check_userspace(machine, probe, npu=npu))
    kept = ok("cache-directory", str(cache))
    if not _writable(cache):
        fix = f"{_owned(cache)}, or set compile_cache (bounded profile: OV_GENAI_NPU_CACHE)"
        kept = error("cache-directory", f"{cache} cannot be written: each start would compile again, for minutes", fix)
    return (*found, kept)


def check_cpu(probe: Probe) -> Finding:
    cpu = probe.find("CPU")
    if probe.error is not None or cpu is None:
        reason = probe.error or "it lists no CPU"
        return error("cpu", f"OpenVINO cannot use this machine: {reason}", "pip install --force-reinstall openvino")
    name = cpu.properties.get("FULL_DEVICE_NAME") or "CPU"
    return ok("cpu", f"this machine can serve on its CPU ({name}, OpenVINO {probe.openvino})")


def healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.severity is not Severity.ERROR for finding in findings)
