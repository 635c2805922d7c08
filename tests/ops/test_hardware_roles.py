"""npu_driver and npu_passthrough_host up to the hardware: in a container, against devices that are files."""

import base64
import hashlib
import io
import json
import tarfile

import pytest

from tests.ops.containers import DEBIAN_13, booted
from tests.ops.playbook import ANSIBLE, play, write_inventory

pytestmark = pytest.mark.timeout(900)

NAME = "npu-ops-hardware"
ADDRESS = "0000:00:0b.0"
RELEASE = {"intel-fw-npu": "1.19.0", "intel-driver-compiler-npu": "1.19.0", "intel-level-zero-npu": "1.19.0"}
DEVICES = f"""
set -eu
rm -rf /srv/sys /srv/dev
device=/srv/sys/devices/pci0000:00/{ADDRESS}
mkdir -p /srv/sys/bus/pci/devices /srv/sys/bus/pci/drivers/$DRIVER /srv/sys/kernel/iommu_groups/7/devices $device
mkdir -p /srv/sys/class/accel/accel0/device /srv/dev/accel
echo 0x8086 > $device/vendor
echo 0x$ID > $device/device
echo 0x120000 > $device/class
ln -s ../../../bus/pci/drivers/$DRIVER $device/driver
ln -s ../../../kernel/iommu_groups/7 $device/iommu_group
ln -s $device /srv/sys/bus/pci/devices/{ADDRESS}
ln -s $device /srv/sys/kernel/iommu_groups/7/devices/{ADDRESS}
for other in $OTHERS; do
  mkdir -p /srv/sys/bus/pci/devices/$other
  echo 0x8086 > /srv/sys/bus/pci/devices/$other/vendor
  echo 0x0001 > /srv/sys/bus/pci/devices/$other/device
  echo ${{CLASS:-0x028000}} > /srv/sys/bus/pci/devices/$other/class
  ln -s /srv/sys/bus/pci/devices/$other /srv/sys/kernel/iommu_groups/7/devices/$other
done
echo 4711 > /srv/sys/class/accel/accel0/device/npu_busy_time_us
touch /srv/dev/accel/accel0
getent group render >/dev/null && chgrp render /srv/dev/accel/accel0
echo "quiet $CMDLINE" > /srv/cmdline
"""
PLAY = """
- name: One role
  hosts: machine
  roles: [ROLE]
"""


@pytest.fixture(scope="module")
def machine(machines_possible, tmp_path_factory):
    with booted(
        DEBIAN_13, f"{tmp_path_factory.getbasetemp()}:{tmp_path_factory.getbasetemp()}:ro", name=NAME
    ) as booting:
        # Nothing boots from it: what writes boot menus and RAM disks only leaves a trace that it was called.
        for tool in ("update-grub", "update-initramfs"):
            booting.run("sh", "-c", f"printf '#!/bin/sh\\necho $0 \"$@\" >> /srv/called\\n' > /usr/local/sbin/{tool}")
            booting.run("chmod", "+x", f"/usr/local/sbin/{tool}")
        yield booting


@pytest.fixture
def devices(machine):
    """Make the devices anew: the NPU's id and driver, who shares its IOMMU group, and the kernel's command line."""

    def make(npu="643e", driver="intel_vpu", others="", kind="0x028000", cmdline=""):
        environment = f"export ID={npu} DRIVER={driver} OTHERS='{others}' CLASS={kind} CMDLINE='{cmdline}'"
        machine.run("bash", "-c", environment + DEVICES)

    return make


@pytest.fixture
def apply(machine, tmp_path):
    """Run one role on the machine."""
    inventory = write_inventory(tmp_path / "hosts.json", {"machine": {machine.name: {}}})

    def run_role(role, *arguments, **variables):
        playbook = tmp_path / "play.yml"
        playbook.write_text(PLAY.replace("ROLE", role), encoding="utf-8")
        return play(inventory, *arguments, playbook=playbook, timeout=600, **variables)

    return run_role


DRIVER = {
    "npu_driver_sysfs": "/srv/sys",
    "npu_driver_dev": "/srv/dev",
    "npu_driver_running_kernel": "6.12.48+deb13-amd64",
    "npu_driver_kernel": False,
    "npu_driver_reboot": False,
}


@pytest.fixture(scope="module")
def archive(machine, tmp_path_factory):
    """A release as Intel packs it, with packages of the same names that hold a file each; its path."""
    path = tmp_path_factory.mktemp("release") / "linux-npu-driver.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for name, version in RELEASE.items():
            script = (
                f"set -eu; d=$(mktemp -d); mkdir -p $d/DEBIAN $d/usr/share/{name};"
                f"echo {version} > $d/usr/share/{name}/version;"
                f"printf 'Package: {name}\\nVersion: {version}\\nArchitecture: amd64\\nMaintainer: a <a@example.net>\\n"
                f"Description: stand-in\\n' > $d/DEBIAN/control; dpkg-deb --build $d /tmp/{name}.deb >/dev/null;"
                f"base64 -w0 /tmp/{name}.deb"
            )
            content = base64.b64decode(machine.run("bash", "-c", script).stdout)
            member = tarfile.TarInfo(f"linux-npu-driver-v{version}/{name}_{version}_amd64.deb")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    path.chmod(0o644)
    return path


def test_a_driver_is_installed_verified_and_left_alone_afterwards(machine, devices, apply, archive):
    devices()
    release = {
        "npu_driver_release_url": f"file://{archive}",
        "npu_driver_release_sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }
    checked = apply("npu_driver", "--check", **DRIVER, **release)
    assert checked.status == 0, checked.output[-5000:]
    machine.run("getent", "group", "render")
    done = apply("npu_driver", **DRIVER, **release)
    assert done.status == 0, done.output[-5000:]
    listed = machine.run("dpkg-query", "--show", "--showformat=${Package} ${Version}\n", *RELEASE).stdout
    assert dict(line.split() for line in listed.splitlines()) == RELEASE
    assert 'GROUP="render"' in machine.run("cat", "/etc/udev/rules.d/70-npu.rules").stdout
    assert "intel_vpu" in machine.run("cat", "/etc/modules-load.d/intel_vpu.conf").stdout
    assert machine.run("dpkg-query", "--show", "firmware-intel-misc", "libze1").returncode == 0
    again = apply("npu_driver", **DRIVER, **release)
    assert again.status == 0, again.output[-5000:]
    assert not any(again.changed.values()), again.changed_tasks()


def test_an_archive_with_another_hash_is_not_unpacked(machine, devices, apply, archive):
    devices()
    wrong = {"npu_driver_release_url": f"file://{archive}", "npu_driver_release_sha256": "0" * 64}
    failed = apply("npu_driver", **DRIVER, **wrong)
    assert failed.status != 0
    assert "checksum" in failed.output
    assert "0" * 64 not in machine.run("ls", "/var/lib/npu-driver").stdout


@pytest.mark.parametrize(
    ("devices_are", "variables", "said"),
    [
        ({"npu": "0001"}, {}, "has no Intel NPU on its PCI bus"),
        ({"driver": "vfio-pci"}, {}, "wanted driver=intel_vpu"),
        ({}, {"npu_driver_release_url": "https://example.net/a.tar.gz"}, "needs npu_driver_release_sha256"),
        (
            {"driver": "vfio-pci"},
            {"npu_driver_running_kernel": "6.12.48+deb13-cloud-amd64"},
            "the flavour without the driver",
        ),
        ({"driver": "none"}, {"npu_driver_running_kernel": "6.1.0-30-amd64"}, "the driver with its counter needs 6.11"),
    ],
)
def test_a_machine_that_cannot_work_is_told_why(devices, apply, devices_are, variables, said):
    devices(**devices_are)
    failed = apply("npu_driver", **(DRIVER | variables))
    assert failed.status != 0
    assert said in failed.text


HOST = {
    "npu_passthrough_host_sysfs": "/srv/sys",
    "npu_passthrough_host_cmdline": "/srv/cmdline",
    "npu_passthrough_host_reboot": False,
}


def test_the_host_hands_the_npu_over(machine, devices, apply):
    devices(driver="vfio-pci", cmdline="intel_iommu=on iommu=pt")
    done = apply("npu_passthrough_host", "--skip-tags=install,guest", **HOST)
    assert done.status == 0, done.output[-5000:]
    assert "alone in its IOMMU group" in done.text
    assert "intel_iommu=on iommu=pt" in machine.run("cat", "/etc/default/grub.d/60-npu-passthrough.cfg").stdout
    bound = machine.run("cat", "/etc/modprobe.d/npu-passthrough.conf").stdout
    assert "options vfio-pci ids=8086:643e" in bound
    assert "softdep intel_vpu pre: vfio-pci" in bound
    called = machine.run("cat", "/srv/called").stdout
    assert "update-grub" in called
    assert "update-initramfs -u -k all" in called
    again = apply("npu_passthrough_host", "--skip-tags=install,guest", **HOST)
    assert again.status == 0
    assert not any(again.changed.values()), again.changed_tasks()


@pytest.mark.parametrize(
    ("devices_are", "said"),
    [
        ({"npu": "0001"}, "has no Intel NPU on its PCI bus"),
        ({"others": "0000:00:0c.0"}, "shares its IOMMU group with 0000:00:0c.0"),
        ({"driver": "intel_vpu", "cmdline": "intel_iommu=on iommu=pt"}, "its NPU is held by intel_vpu, not vfio-pci"),
        ({"driver": "vfio-pci"}, "it was booted without intel_iommu=on iommu=pt"),
    ],
)
def test_a_host_that_cannot_hand_it_over_is_told_why(devices, apply, devices_are, said):
    devices(**devices_are)
    outcome = apply("npu_passthrough_host", "--skip-tags=install,guest", **HOST)
    assert said in outcome.text
    if devices_are.get("driver") != "vfio-pci":
        assert outcome.status != 0


def test_a_bridge_in_the_group_is_no_hindrance(devices, apply):
    devices(driver="vfio-pci", cmdline="intel_iommu=on iommu=pt", others="0000:00:1c.0", kind="0x060400")
    assert apply("npu_passthrough_host", "--skip-tags=install,guest", **HOST).status == 0


def test_every_id_of_the_issue_is_known():
    for role, variable in (
        ("npu_driver", "npu_driver_pci_ids"),
        ("npu_passthrough_host", "npu_passthrough_host_pci_ids"),
    ):
        text = (ANSIBLE / "roles" / role / "vars" / "main.yml").read_text(encoding="utf-8")
        assert f"{variable}: {json.dumps(['7d1d', 'ad1d', '643e', 'b03e', 'fd3e']).replace(chr(34), '')}" in text
