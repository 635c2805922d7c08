"""The doctor over scripted machines: each lacks one thing, and the doctor names it, with a fix, and nothing else."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.doctor.checks import check_models, examine, healthy
from worker_node.doctor.machine import ExaminedMachine, Severity

ADDRESS = "0000:00:0b.0"
PCI = f"sys/bus/pci/devices/{ADDRESS}"
LIB = "usr/lib/x86_64-linux-gnu"
FIRMWARE = "lib/firmware/intel/vpu/vpu_40xx_v1.bin.zst"
COUNTER = "sys/class/accel/accel0/device/npu_busy_time_us"
PACKAGES = ("intel-driver-compiler-npu", "intel-fw-npu", "intel-level-zero-npu")
NPU = DeviceInfo("NPU", {"NPU_DRIVER_VERSION": "1019", "NPU_COMPILER_VERSION": "7"})
CPU = DeviceInfo("CPU")
SEES_NPU = Probe((CPU, NPU), "2026.4.1")
SEES_CPU = Probe((CPU,), "2026.4.1")


class ScriptedMachine(ExaminedMachine):
    """A machine whose device node belongs to `group` and may be used or not."""

    group = "render"
    allowed = True

    def group_of(self, path):
        return self.group

    def may_use(self, path):
        return self.allowed

    def user(self):
        return "ann"


def write(root, path, text=""):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def packages(root, **versions):
    head = "Package: {}\nStatus: install ok installed\nDescription: a driver\n for it\nVersion: {}"
    blocks = [head.format(name, versions.get(name[6:8], "1.28")) for name in PACKAGES]
    write(root, "var/lib/dpkg/status", "\n\n".join(blocks))


@dataclasses.dataclass
class Case:
    machine: ScriptedMachine
    probe: Probe

    @property
    def root(self):
        return self.machine.root

    @property
    def cache(self):
        return self.root / "cache"

    def examine(self):
        return examine(self.machine, self.probe, cache=self.cache)

    def wrong(self):
        return {finding.id: finding for finding in self.examine() if finding.severity is not Severity.OK}


@pytest.fixture
def good(tmp_path):
    """A machine on which all is well."""
    root = tmp_path
    write(root, "proc/sys/kernel/osrelease", "6.12.9+deb13-amd64\n")
    write(root, f"{PCI}/vendor", "0x8086\n")
    write(root, f"{PCI}/device", "0x643e\n")
    write(root, "sys/bus/pci/devices/0000:00:02.0/vendor", "0x8086\n")
    write(root, "sys/bus/pci/devices/0000:00:02.0/device", "0x64a0\n")
    (root / "sys/bus/pci/drivers/intel_vpu").mkdir(parents=True)
    (root / PCI / "driver").symlink_to("../../drivers/intel_vpu")
    write(root, "sys/module/intel_vpu/refcnt", "1")
    write(root, "dev/accel/accel0")
    write(root, COUNTER, "123456\n")
    write(root, FIRMWARE)
    for name in ("libze_loader.so.1", "libze_intel_npu.so.1", "libnpu_driver_compiler.so"):
        write(root, f"{LIB}/{name}")
    packages(root)
    (root / "cache").mkdir()
    return Case(ScriptedMachine(root, "[drm] Initialized intel_vpu 1.0.0 for 0000:00:0b.0 on minor 0"), SEES_NPU)


def only(case, check, *fixes):
    """The one finding, an error, whose fix holds these words."""
    wrong = case.wrong()
    assert list(wrong) == [check]
    assert wrong[check].severity is Severity.ERROR
    assert not healthy(case.examine())
    for words in fixes:
        assert words in wrong[check].fix
    return wrong[check]


def test_a_sound_machine_passes_every_check_once(good):
    findings = good.examine()
    assert healthy(findings)
    assert not good.wrong()
    assert all(finding.found and not finding.fix for finding in findings)
    assert len({finding.id for finding in findings}) == len(findings)


def test_a_machine_without_an_npu_is_told_of_the_emulation(good):
    shutil.rmtree(good.root / PCI)
    good.probe = SEES_CPU
    wrong = good.wrong()
    assert set(wrong) == {"npu-present", "openvino"}
    assert "NPU_NODE_NPU_EMULATION=1" in wrong["npu-present"].fix
    assert "passed" not in wrong["openvino"].found


def without_driver(case):
    (case.root / PCI / "driver").unlink()
    shutil.rmtree(case.root / "sys/module")


def test_a_device_without_driver(good):
    without_driver(good)
    shutil.rmtree(good.root / "dev")
    good.probe = SEES_CPU
    wrong = good.wrong()
    assert list(wrong) == ["kernel-driver", "device-node", "openvino"]
    assert "modprobe intel_vpu" in wrong["kernel-driver"].fix


def in_a_cloud_kernel(case):
    without_driver(case)
    write(case.root, "proc/sys/kernel/osrelease", "6.12.9+deb13-cloud-amd64")


def given_to_a_virtual_machine(case):
    (case.root / PCI / "driver").unlink()
    (case.root / PCI / "driver").symlink_to("../../drivers/vfio-pci")


def outside_the_group(case):
    case.machine.allowed = False


def lacking(path):
    return lambda case: (case.root / path).unlink()


def with_firmware_of_another_chip(case):
    (case.root / FIRMWARE).rename(case.root / "lib/firmware/intel/vpu/vpu_37xx_v1.bin")


def logging_of(line):
    def log(case):
        case.machine.kernel_log = f"usb 1-1: boot failed -110\n{line}\n"

    return log


def with_kernel(release):
    return lambda case: write(case.root, "proc/sys/kernel/osrelease", release)


def seeing(probe):
    def see(case):
        case.probe = probe

    return see


FAULTS = [
    (in_a_cloud_kernel, "kernel-driver", "linux-image-amd64"),
    (given_to_a_virtual_machine, "kernel-driver", "vfio-pci/unbind"),
    (outside_the_group, "device-access", "usermod -a -G render ann; then log in again"),
    (lacking(f"{LIB}/libze_intel_npu.so.1"), "user-mode-driver", "intel-level-zero-npu"),
    (lacking(f"{LIB}/libnpu_driver_compiler.so"), "compiler", "intel-driver-compiler-npu"),
    (lacking(f"{LIB}/libze_loader.so.1"), "level-zero-loader", "libze1"),
    (lacking(COUNTER), "busy-counter", "6.11"),
    (lambda case: write(case.root, COUNTER, "many"), "busy-counter", "6.11"),
    (with_firmware_of_another_chip, "firmware-file", "firmware-intel-misc"),
    (lambda case: packages(case.root, fw="1.27"), "firmware-mismatch", "of one release"),
    (logging_of("MAPPED_INFERENCE_VERSION is NOT compatible with the ELF"), "firmware-compiler", "modprobe intel_vpu"),
    (logging_of("intel_vpu: ivpu_boot(): Failed to boot the firmware: -110"), "firmware-boot", "modprobe intel_vpu"),
    (with_kernel("5.15.0-91-generic"), "kernel-version", "6.11"),
    (with_kernel("6.8.0-31-generic"), "kernel-version", "6.11"),
    (seeing(Probe((), None, "it ended with status -11")), "openvino", "reinstall"),
    (seeing(Probe((DeviceInfo("NPU", {}),), "2026.4.1")), "openvino", "intel-driver-compiler-npu"),
    (seeing(SEES_CPU), "openvino", "first to last"),
]


@pytest.mark.parametrize(("break_it", "check", "fix"), FAULTS)
def test_each_fault_is_one_finding_with_its_fix(good, break_it, check, fix):
    break_it(good)
    only(good, check, fix)


def test_a_lost_device_and_a_log_that_cannot_be_read_are_warnings(good):
    good.machine.kernel_log = "intel_vpu 0000:00:0b.0: [drm] TDR triggered, DEVICE_LOST"
    assert list(good.wrong()) == ["device-lost"]
    good.machine.kernel_log = None
    assert list(good.wrong()) == ["kernel-log"]
    assert healthy(good.examine())


def test_directories_that_cannot_be_made_are_found_whatever_the_rights_say(good, monkeypatch):
    # Root may write to /proc, where nothing can be made.
    monkeypatch.setattr(type(good), "cache", Path("/proc/cache"))
    only(good, "cache-directory", "OV_GENAI_NPU_CACHE")
    assert [check_models(path, {})[0].severity for path in (good.root / "new", Path("/proc/new"))] == ["ok", "warning"]
