"""The Debian package on booted Debian 12 and 13: built, installed, upgraded, purged; and install.sh as a user there.

All without a network.
"""

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.ops.conftest import EMBEDDER
from tests.ops.containers import DEBIAN_12, DEBIAN_13, HANG_S, booted, run

# Each machine installs an environment of some 60 wheels, and packs and unpacks it.
pytestmark = pytest.mark.timeout(7200)

ROOT = Path(__file__).parents[2]
STATE, KEYS, SETTINGS = "/var/lib/npu-node", "/etc/npu-node/api_keys", "/etc/npu-node/node.toml"
CALL = """
import json, urllib.request
key = open("/etc/npu-node/api_keys").read().strip()
def call(path, body=None):
    request = urllib.request.Request("http://127.0.0.1:8081" + path, body, {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request, timeout=300))
print(json.dumps([call("/health")["status"], len(call("/embeddings", b'{"texts": ["a"]}')["embeddings"][0])]))
"""


@pytest.fixture(scope="module", params=[DEBIAN_12, DEBIAN_13], ids=lambda distribution: distribution.name)
def machine(request, containers_possible, wheelhouse, build_wheels, store):
    distribution = request.param
    mounts = (
        f"{ROOT}:/src:ro",
        f"{wheelhouse(distribution.python)}:/wheels:ro",
        f"{build_wheels}:/build:ro",
        f"{store.root / EMBEDDER}:/srv/{EMBEDDER}:ro",
    )
    with booted(distribution, *mounts, name=f"npu-ops-deb-{distribution.name}") as machine:
        machine.run("apt-get", "update", "--quiet")
        machine.run("apt-get", "install", "--quiet", "--yes", "--no-install-recommends", "python3-venv")
        options = "--no-index --find-links=/wheels --find-links=/build"
        build = (
            "env",
            f"PIP_OPTIONS={options}",
            "DIST=/srv/debs",
            "COMPRESSION=-Zgzip -z1",
            "/src/packaging/deb/build.sh",
        )
        machine.run(*build, timeout=3600)
        yield machine


def package(machine):
    return machine.run("sh", "-c", "ls /srv/debs/*.deb").stdout.strip()


def wait_until_ready(machine):
    """Wait until the node embeds; the state of the service is in the error when it does not."""
    deadline = time.monotonic() + HANG_S
    while True:
        asked = machine.run("python3", "-c", CALL, check=False)
        if asked.returncode == 0 and json.loads(asked.stdout) == ["ready", 384]:
            return
        if time.monotonic() > deadline:
            log = machine.run("journalctl", "--unit=npu-node", "--lines=20", "--no-pager", check=False).stdout
            raise AssertionError(f"{asked.stderr[-500:]}\n{log}")
        time.sleep(0.5)


def main_pid(machine):
    return machine.run("systemctl", "show", "--property=MainPID", "--value", "npu-node").stdout.strip()


def test_it_is_installed_serves_survives_an_upgrade_and_leaves_nothing(machine):
    install = ("apt-get", "install", "--quiet", "--yes", "--no-install-recommends")
    told = machine.run(*install, package(machine)).stdout
    assert all(f"  {step}" in told for step in ("npu-node pull --embedded", "systemctl start npu-node\n"))
    # As where systemd does not run.
    hidden = "mount --bind /mnt /run/systemd && /var/lib/dpkg/info/npu-node.postinst configure"
    assert "systemd does not run here" in machine.run("unshare", "--mount", "sh", "-c", hidden).stdout
    assert machine.run("stat", "--format=%U %a", KEYS).stdout.split() == ["root", "600"]
    assert machine.run("systemctl", "is-enabled", "npu-node").stdout.strip() == "enabled"
    assert machine.run("npu-node", "--version").stdout.startswith("npu-node ")

    machine.run("install", "-d", "-o", "npu-node", "-g", "npu-node", f"{STATE}/models")
    machine.run("cp", "-r", f"/srv/{EMBEDDER}", f"{STATE}/models/")
    machine.run("chown", "-R", "npu-node:npu-node", STATE)
    # A command of root works as the service's user on its store.
    machine.run("npu-node", "rm", EMBEDDER)
    assert machine.run("ls", f"{STATE}/models").stdout == ""
    machine.run("cp", "-r", f"/srv/{EMBEDDER}", f"{STATE}/models/")
    machine.run("chown", "-R", "npu-node:npu-node", STATE)
    machine.run("sh", "-c", f"printf '[[models]]\\nname = \"{EMBEDDER}\"\\n' > {SETTINGS}")
    machine.run("systemctl", "start", "npu-node")
    wait_until_ready(machine)
    kept = machine.run("sha256sum", KEYS, SETTINGS).stdout
    before = main_pid(machine)
    assert EMBEDDER in machine.run("npu-node", "ps").stdout
    refused = machine.run("runuser", "-u", "nobody", "--", "npu-node", "pull", "--embedded", check=False)
    assert (refused.returncode, "sudo npu-node pull --embedded" in refused.stderr) == (1, True)
    assert machine.run("find", STATE, "!", "-user", "npu-node").stdout == ""

    machine.run(*install, "--reinstall", package(machine))
    wait_until_ready(machine)
    assert machine.run("sha256sum", KEYS, SETTINGS).stdout == kept
    assert main_pid(machine) != before

    machine.run("apt-get", "purge", "--quiet", "--yes", "npu-node")
    for path in (STATE, "/etc/npu-node", "/usr/lib/npu-node", "/var/cache/npu-node", "/usr/bin/npu-node"):
        assert machine.run("test", "-e", path, check=False).returncode == 1, path
    assert machine.run("getent", "passwd", "npu-node", check=False).returncode == 2
    assert "not-found" in machine.run("systemctl", "show", "--property=LoadState", "npu-node").stdout


def test_the_install_script_installs_for_a_user_and_for_the_machine_and_uninstalls(machine):
    if machine.distribution is not DEBIAN_13:
        pytest.skip("tried on one of the two")
    machine.run("useradd", "--create-home", "--shell", "/bin/sh", "ann")
    install = "PIP_OPTIONS='--no-index --find-links=/wheels --find-links=/build' /src/packaging/install.sh"
    user = ("runuser", "-l", "ann", "-c")
    assert "add /home/ann/.local/bin to PATH" in machine.run(*user, install).stdout
    assert machine.run(*user, ".local/bin/npu-node --version").stdout.startswith("npu-node ")
    machine.run(*user, "/src/packaging/uninstall.sh")
    assert machine.run(*user, "ls .local/share .local/bin").stdout.split() == [".local/bin:", ".local/share:"]

    machine.run("sh", "-c", f"{install} --scope system")
    assert machine.run("npu-node", "--version").stdout.startswith("npu-node ")
    assert machine.run("systemctl", "show", "--property=LoadState", "--value", "npu-node").stdout.strip() == "loaded"
    kept = machine.run("sha256sum", KEYS, SETTINGS).stdout
    machine.run("/src/packaging/uninstall.sh", "--scope", "system")
    assert machine.run("sha256sum", KEYS, SETTINGS).stdout == kept
    for path in ("/opt/npu-node/current", "/usr/local/bin/npu-node", "/etc/systemd/system/npu-node.service"):
        assert machine.run("test", "-e", path, check=False).returncode == 1, path
    machine.run("rm", "-r", "/etc/npu-node")
    machine.run("userdel", "npu-node")


@pytest.mark.long
def test_lintian_has_nothing_to_say(machine, tmp_path):
    # lintian takes minutes for an environment of ten thousand files.
    if shutil.which("lintian") is None:
        pytest.skip("NOT RUN: lintian is not installed")
    name = package(machine)
    run("podman", "cp", f"{machine.name}:{name}", tmp_path)
    done = run("lintian", "--fail-on=error,warning", tmp_path / Path(name).name, check=False)
    assert done.returncode == 0, done.stdout
