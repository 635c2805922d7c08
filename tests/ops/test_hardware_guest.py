"""npu_driver and npu_passthrough_host on a kernel of their own: modules, kernel command line, IOMMU groups, reboots.

The guest has no NPU; another Intel device stands in its place on the bus. So npu_driver must fail at its last task, and
say why.
"""

import pytest

from tests.ops.guests import DEVICE_ID, booted_guest, missing_tools
from tests.ops.playbook import failed, role_runner, succeeded

pytestmark = pytest.mark.timeout(7200)

DRIVER = {"npu_driver_pci_ids": [DEVICE_ID]}
HOST = {"npu_passthrough_host_pci_ids": [DEVICE_ID]}


@pytest.fixture(scope="module")
def guest(ansible, tmp_path_factory):
    if missing := missing_tools():
        pytest.skip(f"NOT RUN: {missing}")
    with booted_guest(tmp_path_factory.mktemp("guest")) as booted:
        yield booted


@pytest.fixture
def apply(guest, tmp_path):
    return role_runner(tmp_path, guest.variables(), timeout=2000)


def test_the_driver_s_kernel_is_installed_and_booted_and_the_other_removed(guest, apply):
    before = guest.boot_id()
    assert "cloud" in guest.run("uname", "-r").stdout
    assert guest.run("modprobe", "intel_vpu", check=False).returncode != 0

    done = apply("npu_driver", **DRIVER)
    assert guest.boot_id() != before
    assert "cloud" not in guest.run("uname", "-r").stdout, done.output[-5000:]
    assert "cloud" not in guest.run("ls", "/boot").stdout
    assert "intel_vpu" in guest.run("cat", "/proc/modules").stdout
    # No NPU, no driver on it: that is what it must say, and at no earlier task.
    assert done.status != 0
    assert "wanted driver=intel_vpu, a node in group render and a busy counter, found driver=i6300ESB" in done.text

    booted = guest.boot_id()
    again = apply("npu_driver", **DRIVER)
    assert guest.boot_id() == booted
    assert "wanted driver=intel_vpu" in again.text
    assert not any(again.changed.values()), again.changed_tasks()


def test_the_iommu_is_turned_on_and_vfio_holds_the_device_after_one_reboot(guest, apply):
    before = guest.boot_id()
    done = succeeded(apply("npu_passthrough_host", "--skip-tags=install,guest", **HOST))
    booted = guest.boot_id()
    assert booted != before
    assert {"intel_iommu=on", "iommu=pt"} <= set(guest.run("cat", "/proc/cmdline").stdout.split())
    assert guest.run("readlink", "/sys/bus/pci/devices/0000:00:0b.0/driver").stdout.strip().endswith("/vfio-pci")
    assert "alone in its IOMMU group" in done.text

    again = succeeded(apply("npu_passthrough_host", "--skip-tags=install,guest", **HOST))
    assert guest.boot_id() == booted
    assert not any(again.changed.values()), again.changed_tasks()


def test_what_the_kernel_s_log_says_of_the_firmware_is_told(guest, apply):
    """It is asked as if it were the guest of itself: its bus has the device, and then its log has the failure."""
    inside = {**HOST, "npu_passthrough_host_guest": "machine"}
    seen = succeeded(apply("npu_passthrough_host", "--tags=verify", **inside))
    assert "machine sees the NPU" in seen.text

    guest.run("echo", "'intel_vpu 0000:00:0b.0: [drm] *ERROR* Failed to boot the firmware: -110'", ">", "/dev/kmsg")
    failed(
        apply("npu_passthrough_host", "--tags=verify", **inside),
        "its firmware does not boot there (-110)",
        "run the node on the host itself",
    )
    failed(
        apply("npu_driver", "--tags=verify", **DRIVER),
        "Its firmware did not boot (-110): restart the machine from cold",
    )
