"""npu_driver up to the hardware: in a container, against devices that are files."""

import base64
import hashlib
import io
import tarfile

import pytest

from tests.ops.playbook import failed, succeeded, unchanged

pytestmark = [pytest.mark.timeout(7200)]

RELEASE = {"intel-fw-npu": "1.19.0", "intel-driver-compiler-npu": "1.19.0", "intel-level-zero-npu": "1.19.0"}
DRIVER = {
    "npu_driver_sysfs": "/srv/sys",
    "npu_driver_dev": "/srv/dev",
    "npu_driver_running_kernel": "6.12.48+deb13-amd64",
    "npu_driver_kernel": False,
    "npu_driver_reboot": False,
}


def stand_in(machine, name, version):
    """Build a package that holds a file; return its path on the machine."""
    control = f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: a <a@example.net>\n"
    script = (
        'set -eu; d=$(mktemp -d); mkdir -p $d/DEBIAN $d/usr/share/$1; echo "$2" > $d/usr/share/$1/version;'
        'printf %s "$3" > $d/DEBIAN/control; dpkg-deb --build $d /srv/$1.deb >/dev/null'
    )
    machine.run("sh", "-c", script, "sh", name, version, f"{control}Description: stand-in\n")
    return f"/srv/{name}.deb"


@pytest.fixture(scope="module")
def archive(hardware, tmp_path_factory):
    """A release as Intel packs it, with packages of the same names that hold a file each; its path."""
    path = tmp_path_factory.mktemp("release") / "linux-npu-driver.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for name, version in RELEASE.items():
            content = base64.b64decode(hardware.run("base64", "-w0", stand_in(hardware, name, version)).stdout)
            member = tarfile.TarInfo(f"linux-npu-driver-v{version}/{name}_{version}_amd64.deb")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    path.chmod(0o644)
    return path


def test_a_driver_is_installed_verified_and_left_alone_afterwards(hardware, devices, apply, archive):
    devices()
    release = {
        "npu_driver_release_url": f"file://{archive}",
        "npu_driver_release_sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }
    succeeded(apply("npu_driver", "--check", **DRIVER, **release))
    hardware.run("getent", "group", "render")
    succeeded(apply("npu_driver", **DRIVER, **release))
    listed = hardware.run("dpkg-query", "--show", "--showformat=${Package} ${Version}\n", *RELEASE).stdout
    assert dict(line.split() for line in listed.splitlines()) == RELEASE
    assert 'GROUP="render"' in hardware.run("cat", "/etc/udev/rules.d/70-npu.rules").stdout
    assert "intel_vpu" in hardware.run("cat", "/etc/modules-load.d/intel_vpu.conf").stdout
    assert hardware.run("dpkg-query", "--show", "firmware-intel-misc", "libze1").returncode == 0
    unchanged(apply("npu_driver", **DRIVER, **release))


def test_an_archive_with_another_hash_is_not_unpacked(hardware, devices, apply, archive):
    devices()
    wrong = {"npu_driver_release_url": f"file://{archive}", "npu_driver_release_sha256": "0" * 64}
    refused = failed(apply("npu_driver", **DRIVER, **wrong))
    assert "checksum" in refused.output
    assert "0" * 64 not in hardware.run("ls", "/var/lib/npu-driver").stdout


@pytest.fixture
def ubuntu(hardware):
    """The machine says that it is Ubuntu 24.04, and finds stand-ins of the packages that only Ubuntu has."""
    for name in ("linux-generic-hwe-24.04", "linux-firmware"):
        stand_in(hardware, name, "6.14.0")
    script = """
    set -eu
    cp -P /etc/os-release /srv/os-release
    rm /etc/os-release
    printf 'NAME="Ubuntu"\\nID=ubuntu\\nVERSION_ID="24.04"\\nVERSION_CODENAME=noble\\n' > /etc/os-release
    cd /srv
    for deb in linux-*.deb; do
      dpkg-deb --field $deb
      printf 'Filename: ./%s\\nSize: %s\\nSHA256: %s\\n\\n' $deb $(stat -c %s $deb) $(sha256sum < $deb | cut -d' ' -f1)
    done > Packages
    echo 'deb [trusted=yes] file:/srv ./' > /etc/apt/sources.list.d/ubuntu.list
    apt-get update -q
    """
    hardware.run("sh", "-c", script)
    yield
    hardware.run("sh", "-c", "cp -P --remove-destination /srv/os-release /etc/; rm /etc/apt/sources.list.d/ubuntu.list")


@pytest.mark.usefixtures("ubuntu")
def test_on_ubuntu_kernel_and_firmware_have_other_names_and_no_source_is_added(hardware, devices, apply):
    devices()
    hardware.run("rm", "--force", "/etc/apt/sources.list.d/npu-driver.sources")
    done = apply(
        "npu_driver", **(DRIVER | {"npu_driver_kernel": True, "npu_driver_running_kernel": "6.14.0-33-generic"})
    )
    assert done.status == 0, done.output[-5000:]
    assert hardware.run("dpkg-query", "--show", "linux-generic-hwe-24.04", "linux-firmware").returncode == 0
    assert "npu-driver.sources" not in hardware.run("ls", "/etc/apt/sources.list.d").stdout
    old = apply("npu_driver", **(DRIVER | {"npu_driver_running_kernel": "6.8.0-31-generic"}))
    assert "it runs 6.8.0-31-generic; the driver with its counter needs 6.11" in old.text


@pytest.mark.parametrize(
    ("devices_are", "variables", "said"),
    [
        ({"npu": "0001", "npu_class": "0x028000"}, {}, "has no Intel NPU on its PCI bus"),
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
    failed(apply("npu_driver", **(DRIVER | variables)), said)
