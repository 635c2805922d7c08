"""A machine with a kernel of its own: a Debian guest under QEMU's software emulation, started by GRUB."""

import contextlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.ops.containers import HANG_S, missing, run, ssh_variables, wait_until_booted
from tests.support.foreign import kept
from tests.support.ports import free_port

TOOLS = ("qemu-system-x86_64", "mmdebstrap", "mke2fs", "ssh", "ssh-keygen")
SUITE = "trixie"
# Booted is the flavour for rented machines, which leaves intel_vpu out. The full one is there already: under emulation
# its installation takes minutes.
KERNELS = "linux-image-cloud-amd64,linux-image-amd64"
# An Intel device on the PCI bus that stands where the NPU would; no driver takes it by itself.
DEVICE = "i6300esb"
DEVICE_ID = "25ab"
_PACKAGES = (
    "ca-certificates,dbus,grub-pc-bin,grub2-common,init,initramfs-tools,iproute2,kmod,openssh-server,procps,python3,"
    f"python3-apt,python3-debian,systemd-resolved,systemd-sysv,udev,zstd,{KERNELS}"
)
# Software emulation is slow at compressing and at syncing: the image asks for little of either.
_BEFORE_PACKAGES = """
mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/etc/dpkg/dpkg.cfg.d"
printf 'MODULES=list\\nCOMPRESS=zstd\\nCOMPRESSLEVEL=1\\n' > "$1/etc/initramfs-tools/conf.d/quick"
echo force-unsafe-io > "$1/etc/dpkg/dpkg.cfg.d/quick"
"""
# QEMU starts GRUB as it would a kernel; from there on it is as on a machine: the menu, the choice, the command line.
_AFTER_PACKAGES = """
printf 'virtio_pci\\nvirtio_blk\\next4\\n' >> "$1/etc/initramfs-tools/modules"
chroot "$1" update-initramfs -u -k all
echo '/dev/vda / ext4 rw 0 1' > "$1/etc/fstab"
echo guest > "$1/etc/hostname"
printf '[Match]\\nType=ether\\n[Network]\\nDHCP=yes\\n' > "$1/etc/systemd/network/wired.network"
chroot "$1" systemctl enable systemd-networkd
printf 'GRUB_TIMEOUT=0\\nGRUB_CMDLINE_LINUX=console=ttyS0\\nGRUB_TERMINAL=serial\\n' > "$1/etc/default/grub"
mkdir -p "$1/boot/grub" "$1/root/.ssh"
chroot "$1" grub-mkimage -O i386-pc -p '(hd0)/boot/grub' -o /boot/grub/core biosdisk ext2 normal linux configfile \
search search_fs_uuid serial terminal test echo gzio
cp -r "$1/usr/lib/grub/i386-pc" "$1/boot/grub/"
cat "$1/usr/lib/grub/i386-pc/lnxboot.img" "$1/boot/grub/core" > "$1/boot/grub/start"
version=$(ls "$1/boot" | sed -n 's/^vmlinuz-\\(.*cloud.*\\)/\\1/p')
printf "linux /boot/vmlinuz-$version root=/dev/vda rw console=ttyS0\\ninitrd /boot/initrd.img-$version\\nboot\\n" \
> "$1/boot/grub/grub.cfg"
"""
_BUILD_TIMEOUT_S = 3600
_BOOT_TIMEOUT_S = 1200


def missing_tools():
    """What this machine lacks for such a guest, in words; None if nothing."""
    return missing(TOOLS, "qemu-system-x86 mmdebstrap e2fsprogs openssh-client")


def image():
    """The directory of the image, made once and kept: `disk`, `start` (GRUB, as QEMU starts it) and `key` (root's)."""
    return kept("guest", _make_image, f"{SUITE} {_PACKAGES} {_BEFORE_PACKAGES} {_AFTER_PACKAGES}")


def _make_image(part):
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", part / "key")
    root = part / "root"
    run(
        "mmdebstrap",
        "--variant=minbase",
        "--format=directory",
        f"--include={_PACKAGES}",
        "--skip=cleanup/apt/lists",
        f"--essential-hook={_BEFORE_PACKAGES}",
        f"--customize-hook={_AFTER_PACKAGES}",
        f"--customize-hook=upload {part / 'key.pub'} /root/.ssh/authorized_keys",
        SUITE,
        root,
        timeout=_BUILD_TIMEOUT_S,
    )
    shutil.copy(root / "boot" / "grub" / "start", part / "start")
    run("mke2fs", "-q", "-t", "ext4", "-d", root, part / "disk", "6G", timeout=_BUILD_TIMEOUT_S)
    shutil.rmtree(root)


@dataclass(frozen=True, slots=True)
class Guest:
    """A booted guest, reached through a port of loopback."""

    port: int
    key: Path
    known_hosts: Path

    def ssh_options(self):
        return (
            *("-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "StrictHostKeyChecking=accept-new"),
            *("-o", "ConnectTimeout=10", "-o", "IdentitiesOnly=yes"),
        )

    def run(self, *command, timeout=HANG_S, check=True):
        login = ("ssh", "-q", "-i", self.key, "-p", self.port, *self.ssh_options(), "root@127.0.0.1")
        return run(*map(str, login), *command, timeout=timeout, check=check)

    def boot_id(self):
        """Another after each start."""
        return self.run("cat", "/proc/sys/kernel/random/boot_id").stdout.strip()

    def variables(self):
        """What Ansible needs to reach it."""
        return ssh_variables("127.0.0.1", self.key, " ".join(self.ssh_options()), ansible_port=self.port)


@contextlib.contextmanager
def booted_guest(directory):
    """A guest that runs while the block does; what it writes to its disk is forgotten. `directory` takes its log."""
    made = image()
    port = free_port()
    console = directory / "console.log"
    machine = (
        *("-machine", "q35,accel=tcg", "-cpu", "max", "-smp", "2", "-m", "2048"),
        *("-display", "none", "-monitor", "none"),
        *("-device", "intel-iommu", "-device", f"{DEVICE},addr=0b.0", "-device", "virtio-rng-pci"),
        *("-drive", f"file={made / 'disk'},format=raw,if=virtio", "-snapshot", "-kernel", made / "start"),
        *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{port}-:22", "-device", "virtio-net-pci,netdev=net"),
        *("-serial", f"file:{console}"),
    )
    process = subprocess.Popen(["qemu-system-x86_64", *map(str, machine)], stdin=subprocess.DEVNULL)
    guest = Guest(port, made / "key", directory / "known_hosts")
    try:
        wait_until_booted(
            guest.run, lambda: console.read_text(errors="replace"), _BOOT_TIMEOUT_S, lambda: process.poll() is None
        )
        yield guest
    finally:
        process.kill()
        process.wait()
