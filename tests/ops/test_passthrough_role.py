"""npu_passthrough_host up to the hardware: in a container, against devices that are files and a real libvirt."""

import json
from xml.etree import ElementTree

import pytest

from tests.ops.playbook import failed, succeeded, unchanged

pytestmark = [pytest.mark.timeout(7200)]

IMAGES = "/var/lib/libvirt/images"

HOST = {
    "npu_passthrough_host_sysfs": "/srv/sys",
    "npu_passthrough_host_cmdline": "/srv/cmdline",
    "npu_passthrough_host_reboot": False,
}


def test_the_host_hands_the_npu_over(hardware, devices, apply):
    devices(driver="vfio-pci", cmdline="intel_iommu=on iommu=pt")
    done = succeeded(apply("npu_passthrough_host", "--skip-tags=install,guest", **HOST))
    assert "alone in its IOMMU group" in done.text
    assert "intel_iommu=on iommu=pt" in hardware.run("cat", "/etc/default/grub.d/60-npu-passthrough.cfg").stdout
    bound = hardware.run("cat", "/etc/modprobe.d/npu-passthrough.conf").stdout
    assert "options vfio-pci ids=8086:643e" in bound
    assert "softdep intel_vpu pre: vfio-pci" in bound
    called = hardware.run("cat", "/srv/called").stdout
    assert "update-grub" in called
    assert "update-initramfs -u -k all" in called
    unchanged(apply("npu_passthrough_host", "--skip-tags=install,guest", **HOST))


@pytest.mark.parametrize(
    ("devices_are", "said"),
    [
        ({"npu": "0001", "npu_class": "0x028000"}, "has no Intel NPU on its PCI bus"),
        ({"npu": "e0f1"}, "an Intel accelerator that this role does not know, 8086:e0f1"),
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
    succeeded(apply("npu_passthrough_host", "--skip-tags=install,guest", **HOST))


def test_a_guest_is_made_of_an_image_and_another_is_adopted(hardware, devices, apply):
    """The domains are defined in a real libvirt and not started: their NPU is a file."""
    devices(driver="vfio-pci", cmdline="intel_iommu=on iommu=pt")
    hardware.run("sh", "-c", "truncate --size=8M /srv/cloud.img")
    image = {
        "npu_passthrough_host_image_url": "file:///srv/cloud.img",
        "npu_passthrough_host_image_sha256": hardware.run("sha256sum", "/srv/cloud.img").stdout.split()[0],
        "npu_passthrough_host_guest_ssh_keys": ["ssh-ed25519 AAAA operator"],
    }
    succeeded(apply("npu_passthrough_host", "--check", **HOST, **image))
    succeeded(apply("npu_passthrough_host", **HOST, **image))
    domain = virsh(hardware, "dumpxml", "npu-guest")
    assert npu_of(domain) == {"domain": "0x0000", "bus": "0x00", "slot": "0x0b", "function": "0x0"}
    disk = json.loads(hardware.run("qemu-img", "info", "--output=json", f"{IMAGES}/npu-guest.qcow2").stdout)
    assert (disk["format"], disk["virtual-size"]) == ("qcow2", 40 * 2**30)
    assert "ssh-ed25519 AAAA operator" in hardware.run("cat", f"{IMAGES}/npu-guest.user-data").stdout

    unchanged(apply("npu_passthrough_host", **HOST, **image))

    other = parsed(domain)
    other.find("name").text = "of-old"
    other.remove(other.find("uuid"))
    other.find("devices").remove(other.find("devices/hostdev"))
    hardware.run("sh", "-c", 'printf %s "$1" > /srv/of-old.xml', "sh", ElementTree.tostring(other, "unicode"))
    virsh(hardware, "define", "/srv/of-old.xml")
    succeeded(apply("npu_passthrough_host", npu_passthrough_host_domain="of-old", **HOST))
    assert npu_of(virsh(hardware, "dumpxml", "of-old")) == npu_of(domain)

    failed(apply("npu_passthrough_host", npu_passthrough_host_domain="nobody", **HOST), "There is no domain nobody")


def virsh(machine, *command):
    return machine.run("virsh", "--connect", "qemu:///system", *command).stdout


def parsed(domain):
    return ElementTree.fromstring(domain)  # noqa: S314  (written by libvirt)


def npu_of(domain):
    return parsed(domain).find("devices/hostdev/source/address").attrib
