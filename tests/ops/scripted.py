"""A machine whose NPU, IOMMU and kernel command line are files below /srv."""

import contextlib

from tests.ops.containers import DEBIAN_13, ONLINE, booted

_NAME = "npu-ops-hardware"
_ADDRESS = "0000:00:0b.0"
_DEVICES = f"""
set -eu
rm -rf /srv/sys /srv/dev
device=/srv/sys/devices/pci0000:00/{_ADDRESS}
mkdir -p /srv/sys/bus/pci/devices /srv/sys/bus/pci/drivers/$DRIVER /srv/sys/kernel/iommu_groups/7/devices $device
mkdir -p /srv/sys/class/accel/accel0/device /srv/dev/accel
echo 0x8086 > $device/vendor
echo 0x$ID > $device/device
echo $NPU_CLASS > $device/class
ln -s ../../../bus/pci/drivers/$DRIVER $device/driver
ln -s ../../../kernel/iommu_groups/7 $device/iommu_group
ln -s $device /srv/sys/bus/pci/devices/{_ADDRESS}
ln -s $device /srv/sys/kernel/iommu_groups/7/devices/{_ADDRESS}
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


@contextlib.contextmanager
def booted_scripted(files):
    """Such a machine while the block runs; the directory `files` is read there under its own path."""
    with booted(DEBIAN_13, f"{files}:{files}:ro", name=_NAME, supply=ONLINE) as machine:
        # Nothing boots from it: what writes boot menus and RAM disks only leaves a trace that it was called.
        for tool in ("update-grub", "update-initramfs"):
            machine.run("sh", "-c", f"printf '#!/bin/sh\\necho $0 \"$@\" >> /srv/called\\n' > /usr/local/sbin/{tool}")
            machine.run("chmod", "+x", f"/usr/local/sbin/{tool}")
        yield machine


def script_devices(
    machine, npu="643e", npu_class="0x120000", driver="intel_vpu", others="", kind="0x028000", cmdline=""
):
    """Make the devices again: the NPU's id, class and driver, who shares its IOMMU group, the kernel's command line."""
    environment = (
        f"export ID={npu} NPU_CLASS={npu_class} DRIVER={driver} OTHERS='{others}' CLASS={kind} CMDLINE='{cmdline}'"
    )
    machine.run("bash", "-c", environment + _DEVICES)
