"""The doctor over scripted machines: each lacks one thing, and the doctor names it, with a fix, and nothing else."""

import dataclasses
import errno
import shutil
from pathlib import Path
from typing import ClassVar

import pytest

from worker_node.core.operating_system import WINDOWS
from worker_node.devices.npu import version_in
from worker_node.devices.probe import DeviceInfo, Probe
from worker_node.doctor import checks
from worker_node.doctor.checks import NPUS, WindowsNpu, check_models, examine, healthy, known_drivers
from worker_node.doctor.machine import ExaminedMachine, Severity, ok

ADDRESS = "0000:00:0b.0"
PCI = f"sys/bus/pci/devices/{ADDRESS}"
LIB = "usr/lib/x86_64-linux-gnu"
FIRMWARE = "lib/firmware/intel/vpu/vpu_40xx_v1.bin.zst"
OTHER_FIRMWARE = "lib/firmware/intel/vpu/vpu_37xx_v1.bin"
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
    environment: ClassVar[dict] = {}

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
    blocks = [
        head.format(name, versions.get(name[6:8], versions.get("every", "1.35.0.20260701-1"))) for name in PACKAGES
    ]
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
    """A machine with Linux on which all is well."""
    if WINDOWS:
        pytest.skip("examines a machine with Linux")
    root = tmp_path
    write(root, "proc/sys/kernel/osrelease", "6.17.0-40-generic\n")
    write(root, "etc/os-release", 'PRETTY_NAME="Ubuntu 24.04.4 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\n')
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


@pytest.mark.parametrize(
    ("device", "name", "generation", "driver"),
    [
        ("7d1d", "Meteor Lake", "37xx", "1.16.0"),
        ("ad1d", "Arrow Lake", "37xx", "1.16.0"),
        ("643e", "Lunar Lake", "40xx", "1.16.0"),
        ("b03e", "Panther Lake", "50xx", "1.28.0"),
        ("fd3e", "Wildcat Lake", "50xx", "1.32.0"),
        ("d71d", "Nova Lake", "60xx", "1.39.1"),
    ],
)
def test_every_generation_is_known_with_its_firmware_and_first_driver(good, device, name, generation, driver):
    write(good.root, f"{PCI}/device", f"0x{device}")
    if driver == "1.39.1":
        write(good.root, "proc/sys/kernel/osrelease", "7.0.0-38-generic\n")
    (good.root / FIRMWARE).rename(good.root / FIRMWARE.replace("40xx", generation))
    packages(good.root, every=f"{driver}.20260701-1")
    assert not good.wrong()
    assert any(name in finding.found for finding in good.examine() if finding.id == "npu-present")
    packages(good.root, every="1.27.0.20251101-1")
    assert ("driver-npu" in good.wrong()) == (name in {"Panther Lake", "Wildcat Lake", "Nova Lake"})


def test_an_accelerator_with_an_unknown_id_is_named_and_examined(good):
    write(good.root, f"{PCI}/device", "0xe0f1\n")
    write(good.root, f"{PCI}/class", "0x120000\n")
    (good.root / FIRMWARE).unlink()
    wrong = good.wrong()
    assert list(wrong) == ["npu-present"], "its firmware has an unknown name"
    assert wrong["npu-present"].severity is Severity.WARNING
    assert "8086:e0f1" in wrong["npu-present"].found
    assert "update the node" in wrong["npu-present"].fix
    (good.root / PCI / "driver").unlink()
    assert "a newer kernel" in good.wrong()["kernel-driver"].fix


def test_a_known_npu_goes_before_another_accelerator_of_its_class(good):
    for name, value in (("vendor", "0x8086"), ("device", "0x0b30"), ("class", "0x120000")):
        write(good.root, f"sys/bus/pci/devices/0000:00:01.0/{name}", value)
    assert not good.wrong()


def test_a_machine_of_kernel_7_2_whose_frequencies_have_a_folder_is_sound(good):
    write(good.root, "proc/sys/kernel/osrelease", "7.2.0-5-generic\n")
    write(good.root, "etc/os-release", 'NAME="Ubuntu"\nVERSION_ID="26.04"\n')
    for name, value in (("hw_max_freq", "1900"), ("current_freq", "0"), ("set_max_freq", "1900")):
        write(good.root, f"sys/class/accel/accel0/device/freq/{name}", value)
    packages(good.root, every="1.39.1.20261119-1")
    assert list(good.wrong()) == ["driver-kernel"]
    assert "verified with Ubuntu 24.04 and Ubuntu 26.04 and kernel 7.0" in good.wrong()["driver-kernel"].found


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
    write(case.root, "proc/sys/kernel/osrelease", "6.17.9+deb13-cloud-amd64")


def given_to_a_virtual_machine(case):
    (case.root / PCI / "driver").unlink()
    (case.root / PCI / "driver").symlink_to("../../drivers/vfio-pci")


def closed_to_this_user(case):
    case.machine.allowed = False


def lacking(path):
    return lambda case: (case.root / path).unlink()


def logging_of(line):
    return lambda case: setattr(case.machine, "kernel_log", f"usb 1-1: boot failed -110\n{line}\n")


def with_kernel(release, driver="1.10.0"):
    def boot(case):
        write(case.root, "proc/sys/kernel/osrelease", release)
        packages(case.root, every=driver)

    return boot


def seeing(probe):
    return lambda case: setattr(case, "probe", probe)


FAULTS = [
    (in_a_cloud_kernel, "kernel-driver", "linux-image-amd64"),
    (given_to_a_virtual_machine, "kernel-driver", "vfio-pci/unbind"),
    (closed_to_this_user, "device-access", "usermod -a -G render ann; then log in again"),
    (lacking(f"{LIB}/libze_intel_npu.so.1"), "user-mode-driver", "intel-level-zero-npu"),
    (lacking(f"{LIB}/libnpu_driver_compiler.so"), "compiler", "intel-driver-compiler-npu"),
    (lacking(f"{LIB}/libze_loader.so.1"), "level-zero-loader", "libze1"),
    (lacking(COUNTER), "busy-counter", "6.11"),
    (lambda case: write(case.root, COUNTER, "many"), "busy-counter", "6.11"),
    (lambda case: (case.root / FIRMWARE).rename(case.root / OTHER_FIRMWARE), "firmware-file", "firmware-intel-misc"),
    (lambda case: packages(case.root, fw="1.27"), "firmware-mismatch", "of one release"),
    (logging_of("MAPPED_INFERENCE_VERSION is NOT compatible with the ELF"), "firmware-compiler", "modprobe intel_vpu"),
    (logging_of("intel_vpu: ivpu_boot(): Failed to boot the firmware: -110"), "firmware-boot", "ESXi"),
    (with_kernel("5.15.0-91-generic"), "kernel-version", "6.11"),
    (with_kernel("6.10.14-amd64"), "kernel-version", "6.11"),
    (seeing(Probe((), None, "it ended with status -11")), "openvino", "reinstall"),
    (seeing(Probe((DeviceInfo("NPU", {}),), "2026.4.1")), "openvino", "intel-driver-compiler-npu"),
    (seeing(SEES_CPU), "openvino", "first to last"),
]


@pytest.mark.parametrize(("break_it", "check", "fix"), FAULTS)
def test_each_fault_is_one_finding_with_its_fix(good, break_it, check, fix):
    break_it(good)
    only(good, check, fix)


def test_the_first_kernel_with_a_busy_counter_is_new_enough(good):
    with_kernel("6.11.0-8-generic")(good)
    assert "kernel-version" not in good.wrong()


def test_a_device_without_a_free_context_is_named_with_the_limits(good):
    good.machine.open_error = lambda _path: OSError(errno.EMFILE, "Too many open files")
    found = only(good, "device-access", "sudo fuser -v /dev/accel/accel0")
    assert "64 and 127 for one user" in found.found


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
    assert [next(check_models(path, {})).severity for path in (good.root / "new", Path("/proc/new"))] == [
        "ok",
        "warning",
    ]


@pytest.mark.parametrize(
    ("driver", "kernel", "system", "said"),
    [
        ("1.35.0.20260701-1", "6.17.0-40-generic", "Ubuntu 24.04", []),
        ("1.35.0.20260701-1", "7.0.1", "Ubuntu 24.04", ["linux-npu-driver#134"]),
        ("1.33.0.20260501-1", "7.0.1", "Ubuntu 24.04", ["v1.33.0"]),
        ("1.38.0.20260901-1", "7.0.0-31-generic", "Ubuntu 26.04", []),
        ("1.38.0.20260901-1", "7.0.0-31-generic", "Ubuntu 24.04", []),
        ("1.39.1.20261119-1", "7.0.0-38-generic", "Ubuntu 26.04", []),
        ("1.39.1.20261119-1", "6.17.0", "Ubuntu 24.04", ["v1.39.1"]),
        ("1.35.0.20260701-1", "6.17.0", "Debian GNU/Linux 13", ["linux-npu-driver#134"]),
        ("1.35.0.20260701-1", "6.12.9+deb13-amd64", "Debian GNU/Linux 13", ["linux-npu-driver#134", "#87"]),
        ("1.16.0.20250328-1", "6.14.0-33-generic", "Ubuntu 24.04", ["linux-npu-driver#87"]),
        ("1.16.0.20250328-1", "6.15.2", "", []),
        ("1.10.0.20250101-1", "6.12.9", "Debian GNU/Linux 13", []),
    ],
)
def test_pairs_of_driver_and_kernel_are_warnings_with_their_source(good, driver, kernel, system, said):
    packages(good.root, every=driver)
    write(good.root, "proc/sys/kernel/osrelease", kernel)
    name, _, version = system.rpartition(" ")
    write(good.root, "etc/os-release", f'NAME="{name}"\nVERSION_ID={version}\n')
    findings = [finding for finding in good.examine() if finding.id == "driver-kernel"]
    warnings = [finding for finding in findings if finding.severity is Severity.WARNING]
    assert len(warnings) == len(said)
    for finding, source in zip(warnings, said, strict=True):
        assert source in finding.found
        assert finding.fix
    assert healthy(good.examine())


@pytest.mark.parametrize(
    ("driver", "kernel", "openvino", "warned"),
    [
        ("1.33.0", "6.17.0", "2026.4.1-22219-abc", True),
        ("1.33.0", "6.17.0", "2026.2.0-21000-abc", False),
        ("1.39.1", "7.0.0", "2026.4.1-22219-abc", False),
        ("1.39.1", "7.0.0", "2027.0.0-23000-abc", True),
        ("1.35.0", "6.17.0", "2027.0.0-23000-abc", False),
    ],
)
def test_an_openvino_that_is_newer_than_the_drivers_own_is_a_warning(good, driver, kernel, openvino, warned):
    packages(good.root, every=driver)
    write(good.root, "proc/sys/kernel/osrelease", kernel)
    good.probe = Probe((CPU, NPU), openvino)
    assert list(good.wrong()) == ["driver-openvino"] * warned
    assert healthy(good.examine())


def test_a_driver_that_no_package_names_is_not_judged(good):
    (good.root / "var/lib/dpkg/status").unlink()
    assert not good.wrong()


def test_every_row_of_the_pairs_can_be_read():
    rows = known_drivers()
    assert set(rows) == {"first", "verified", "problem", "windows"}
    for row in (*rows["first"], *rows["verified"], *rows["problem"]):
        assert "linux-npu-driver" in row["source"]
        assert not version_in("0", row["driver"])
        version_in("6.17", row.get("kernel", "6.17"))
    assert all(row["systems"] for row in rows["verified"])
    for row in rows["windows"]:
        assert "#" in row["source"]
        assert row["npu"] in {name for name, _ in NPUS.values()}
        version_in("32.0.100.1", row["driver"])


def on_windows(npu, probe=SEES_NPU):
    return {finding.id: finding for finding in checks.check_windows(npu, probe)}


def test_on_windows_the_driver_is_named_with_its_date_and_nothing_of_linux_is():
    found = on_windows(WindowsNpu("643e", "32.0.100.4724", "3-19-2026"))
    assert found["windows-driver"] == ok("windows-driver", "driver 32.0.100.4724 of 2026-03-19")
    assert found["npu-present"].found == "Lunar Lake NPU 8086:643e"
    assert healthy(found.values())
    assert found["busy-counter"].severity is Severity.WARNING
    for npu, probe in ((None, SEES_CPU), (WindowsNpu("7d1d"), SEES_CPU), (WindowsNpu("7d1d", "32.0.1"), SEES_NPU)):
        text = " ".join(finding.found + finding.fix for finding in on_windows(npu, probe).values())
        for word in ("0000:00", "PCI bus", "firmware", "render", "/dev/accel", "sudo", "apt", "modprobe"):
            assert word not in text


@pytest.mark.parametrize(
    ("npu", "probe", "check", "words", "fix"),
    [
        (None, SEES_CPU, "npu-present", "no Intel NPU", "Device Manager"),
        (WindowsNpu("643e"), SEES_CPU, "windows-driver", "no driver", "intel.com"),
        (WindowsNpu("b03e", "32.0.100.5539"), SEES_NPU, "windows-driver", "crash on Core Ultra Series 3", "intel.com"),
        (WindowsNpu("643e", "32.0.100.4724"), SEES_CPU, "openvino", "sees no NPU", "fix the errors"),
        (
            WindowsNpu("643e", "32.0.100.4724"),
            Probe((CPU, DeviceInfo("NPU", {})), "2026.4.1"),
            "openvino",
            "no compiler",
            "intel.com",
        ),
    ],
)
def test_on_windows_what_the_npu_lacks_is_an_error_with_its_fix(npu, probe, check, words, fix):
    finding = on_windows(npu, probe)[check]
    assert finding.severity is Severity.ERROR
    assert words in finding.found
    assert fix in finding.fix


def test_on_windows_an_npu_that_openvino_alone_knows_is_not_called_missing():
    found = on_windows(None, SEES_NPU)["npu-present"]
    assert (found.severity, found.fix.startswith("update the node")) == (Severity.WARNING, True)


@pytest.mark.parametrize(("device", "driver"), [("b03e", "32.0.100.5540"), ("643e", "32.0.100.4509")])
def test_on_windows_a_newer_driver_and_another_generation_are_not_accused(device, driver):
    assert on_windows(WindowsNpu(device, driver))["windows-driver"].severity is Severity.OK


def test_a_stale_library_beside_a_newer_driver_is_found_wherever_it_is(good):
    write(good.root, "usr/local/lib/libze_intel_vpu.so.1.13.0")
    wrong = good.wrong()
    assert list(wrong) == ["stale-driver"]
    assert wrong["stale-driver"].severity is Severity.WARNING
    assert "/usr/local/lib/libze_intel_vpu.so*" in wrong["stale-driver"].fix
    (good.root / LIB / "libze_intel_npu.so.1").unlink()
    assert not good.wrong(), "by itself it is the driver of before 1.16"


def test_the_search_for_firmware_by_its_old_names_is_nothing_when_the_driver_has_found_it(good):
    line = "intel_vpu 0000:00:0b.0: firmware: failed to load vpu_37xx.bin (-2)\n"
    good.machine.kernel_log = 3 * line + "[drm] Initialized intel_vpu 1.0.0 for 0000:00:0b.0 on minor 0"
    assert not good.wrong()


def test_a_suspended_device_is_sound(good):
    """Its frequency is 0, and its counter stands still."""
    write(good.root, "sys/class/accel/accel0/device/npu_current_frequency_mhz", "0\n")
    write(good.root, "sys/class/accel/accel0/device/power/runtime_status", "suspended\n")
    assert not good.wrong()


CONTAINERS = {
    "podman": lambda case: write(case.root, "run/.containerenv"),
    "docker": lambda case: write(case.root, ".dockerenv"),
    "kubernetes": lambda case: setattr(case.machine, "environment", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_without_the_device_is_told_how_it_gets_it(good, kind):
    CONTAINERS[kind](good)
    shutil.rmtree(good.root / "dev")
    shutil.rmtree(good.root / "lib/firmware")
    words = ["npu.intel.com/accel"] if kind == "kubernetes" else ["--device /dev/accel/accel0", "--group-add"]
    only(good, "device-node", *words)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_whose_device_is_closed_to_it_is_told_of_devices_and_groups_not_of_usermod(good, kind):
    CONTAINERS[kind](good)
    good.machine.allowed = False
    found = only(good, "device-access", *(["deviceGroup"] if kind == "kubernetes" else ["--group-add"]), "volume")
    assert "usermod" not in found.fix


def test_wsl2_is_named_for_what_it_is(good):
    shutil.rmtree(good.root / PCI)
    shutil.rmtree(good.root / "dev")
    write(good.root, "proc/sys/kernel/osrelease", "6.18.33.2-microsoft-standard-WSL2")
    good.probe = SEES_CPU
    assert "WSL2" in good.wrong()["npu-present"].found
    assert "Windows" in good.wrong()["npu-present"].fix


def test_a_device_that_cannot_be_opened_is_not_usable_whatever_its_rights_say(tmp_path, monkeypatch):
    """So is one that was given to a container as a volume: the container's rules forbid to open it."""
    write(tmp_path, "dev/accel/accel0")
    machine = ExaminedMachine(tmp_path)
    assert machine.may_use("dev/accel/accel0")
    assert not machine.may_use("dev/accel/accel1")

    def forbidden(*_arguments):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("worker_node.doctor.machine.os.open", forbidden)
    assert not machine.may_use("dev/accel/accel0")


def supplied(root, name, **values):
    for file, value in values.items():
        write(root, f"sys/class/power_supply/{name}/{file}", f"{value}\n")


def test_a_battery_and_an_adapter_that_is_too_weak_are_warnings(good):
    supplied(good.root, "BAT0", type="Battery", status="Discharging")
    assert list(good.wrong()) == ["power-source"]
    supplied(good.root, "dock", type="USB", online=1, voltage_max=20_000_000, current_max=3_000_000)
    warning = good.wrong()["power-source"]
    assert warning.found == "the battery discharges although an adapter of 60 W is connected"
    supplied(good.root, "BAT0", status="Charging")
    assert not good.wrong()
    assert [finding.found for finding in good.examine() if finding.id == "power-source"] == ["an adapter of 60 W"]


def test_a_frequency_that_was_limited_is_a_warning_with_its_fix(good):
    freq = "sys/class/accel/accel0/device/freq"
    write(good.root, f"{freq}/hw_max_freq", "1950\n")
    write(good.root, f"{freq}/set_max_freq", "1950\n")
    assert not good.wrong()
    write(good.root, f"{freq}/set_max_freq", "700\n")
    warning = good.wrong()["npu-frequency"]
    assert "max 1950, set_max 700" in warning.found
    assert warning.fix.startswith("echo 1950 | sudo tee ")


def test_whether_replies_will_name_joules_is_said_and_no_fault(good):
    def said():
        return next(finding.found for finding in good.examine() if finding.id == "energy-counter")

    assert "the kernel needs intel_pmt_telemetry" in said()
    write(good.root, "sys/class/intel_pmt/telem1/guid", "0x3072005\n")
    write(good.root, "sys/class/intel_pmt/telem1/telem", " " * 3352)
    assert said().endswith("can be read: replies name the joules of the NPU")
    assert not good.wrong()
