"""Machines for the roles: containers that boot systemd, made of nothing but a distribution's own packages."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.support.foreign import kept

TOOLS = ("podman", "runc", "mmdebstrap", "ssh", "ssh-keygen")
_PACKAGES = (
    "ca-certificates,dbus,dbus-user-session,init,iproute2,kmod,libpam-systemd,openssh-server,procps,python3,python3-apt,"
    "systemd,systemd-sysv,udev"
)
# The packages that the roles of a node and its monitoring install. The image brings an archive of them as its only
# source: apt installs them from there, and no mirror or name server can fail a test.
_ROLES_PACKAGES = "caddy nftables nginx prometheus prometheus-node-exporter python3-venv"
_DOWNLOAD = """
set -eu
chroot "$1" apt-get update --quiet
chroot "$1" apt-get install --quiet --yes --download-only {packages}
mkdir -p "$1/srv/apt"
cd "$1/var/cache/apt/archives"
for deb in *.deb; do mv "$deb" "$1/srv/apt/$(echo "$deb" | sed 's/%3a/_/')"; done
"""
SUPPLIED = (
    _DOWNLOAD.format(packages=_ROLES_PACKAGES)
    + """
cd "$1/srv/apt"
for deb in *.deb; do
  dpkg-deb --field "$deb"
  printf 'Filename: ./%s\\nSize: %s\\n' "$deb" "$(stat --format=%s "$deb")"
  printf 'SHA256: %s\\n\\n' "$(sha256sum < "$deb" | cut --delimiter=' ' --fields=1)"
done > Packages
echo 'deb [trusted=yes] file:/srv/apt ./' > "$1/etc/apt/sources.list"
"""
)
# Where sources are added and packages come from a mirror: without the security archive, that is one host less.
ONLINE = "true"
# What a container of this kind needs to boot systemd on a kernel with the old control groups as well as the new.
_FLAGS = (
    "--runtime=runc",
    "--systemd=always",
    "--privileged",
    "--ulimit=nofile=1024:1024",
    "--ulimit=nproc=1024:1024",
    "--env=SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1",
)
# Credentials are mounted for a service from outside of its namespace. A machine's root is shared, a container's is not.
_INIT = ("/bin/sh", "-c", "mount --make-rshared / && exec /sbin/init")
# All limits are for a hang: on a shared machine a step of a second may take a minute.
HANG_S = 600
_BUILD_TIMEOUT_S = 1800
_RUN_LABEL = "npu-ops-run"


@dataclass(frozen=True, slots=True)
class Distribution:
    """`python` is the version of its python3, for which wheels are needed."""

    name: str
    suite: str
    python: str


DEBIAN_12 = Distribution("debian12", "bookworm", "3.11")
DEBIAN_13 = Distribution("debian13", "trixie", "3.13")


def missing(tools, packages):
    """Which tools this machine lacks, in words; None if none."""
    absent = [tool for tool in tools if shutil.which(tool) is None]
    return f"{', '.join(absent)} not installed (apt-get install {packages})" if absent else None


def missing_tools():
    """What this machine lacks for such containers, in words; None if nothing."""
    if os.geteuid() != 0:
        return "containers that boot systemd need root here"
    return missing(TOOLS, "podman runc mmdebstrap netavark aardvark-dns openssh-client")


def run(*command, timeout=HANG_S, check=True, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
    if check and done.returncode:
        raise AssertionError(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done


def _mirror():
    """The archive that this machine itself installs from."""
    sites = run("apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages").stdout.split()
    return next(site for site in sites if not site.rstrip("/").endswith("-security"))


def image(distribution, supply=SUPPLIED):
    """The image of a distribution with what `supply` puts into it; its name. It is made once and kept."""
    return _image(distribution, distribution.name, _PACKAGES, supply)


def bare_image(distribution):
    """The image of a distribution without anything that it does not itself need: no Python, no systemd."""
    return _image(distribution, f"{distribution.name}-bare", "ca-certificates", "true")


def _image(distribution, name, packages, supply):
    sources = f"deb {_mirror()} {distribution.suite} main"

    def bootstrap(part):
        run(
            "mmdebstrap",
            "--variant=minbase",
            "--format=tar",
            f"--include={packages}",
            '--aptopt=Acquire::Check-Valid-Until "false"',
            '--aptopt=Acquire::Retries "10"',
            f"--customize-hook={supply}",
            *(distribution.suite, part / "image.tar", sources),
            timeout=_BUILD_TIMEOUT_S,
        )

    made = kept(name, bootstrap, f"{sources} {packages} {supply}")
    tag = f"localhost/npu-ops-{made.name}"
    if run("podman", "image", "exists", tag, check=False).returncode:
        run("podman", "import", made / "image.tar", tag, timeout=_BUILD_TIMEOUT_S)
    return tag


def ssh_key():
    """The key that every machine lets in as root; its path."""

    def generate(part):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", part / "key")

    return kept("ops-ssh", generate) / "key"


def ssh_variables(host, key, options, **more):
    """What Ansible needs to reach a machine as root."""
    return {
        "ansible_connection": "ssh",
        "ansible_host": host,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": options,
        "ansible_timeout": 60,
        **more,
    }


@dataclass(frozen=True, slots=True)
class Machine:
    """A booted container; `address` is its own, reached from this machine alone."""

    name: str
    address: str
    distribution: Distribution

    def variables(self):
        """What Ansible needs to reach it: by SSH, as it reaches a real one. Its host key is as new as the machine."""
        options = "-o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -o LogLevel=ERROR -o IdentitiesOnly=yes"
        return ssh_variables(self.address, ssh_key(), options)

    def run(self, *command, timeout=HANG_S, check=True):
        return run("podman", "exec", self.name, *command, timeout=timeout, check=check)


@contextlib.contextmanager
def booted(distribution, *mounts, name, supply=SUPPLIED):
    """A machine that runs while the block does. `mounts` are podman's `--volume` values.

    Its name tells the run of the tests that it belongs to: another run's machine of this kind is left alone.
    """
    _remove_machines_of_ended_runs()
    name = f"{name}-{os.getpid()}"
    # The workers of pytest-xdist are pinned to a core each. A machine, and what provisions it, has all of them.
    os.sched_setaffinity(0, range(os.cpu_count()))
    run(
        "podman",
        "run",
        "--detach",
        *_FLAGS,
        f"--name={name}",
        f"--label={_RUN_LABEL}={os.getpid()}",
        f"--hostname={name}",
        *(f"--volume={mount}" for mount in mounts),
        image(distribution, supply),
        *_INIT,
    )
    try:
        wait_until_booted(partial(run, "podman", "exec", name), partial(_log_of, name))
        address = run("podman", "inspect", "--format={{.NetworkSettings.IPAddress}}", name).stdout.strip()
        machine = Machine(name, address, distribution)
        public = ssh_key().with_suffix(".pub").read_text(encoding="utf-8")
        authorize = 'mkdir -p -m 700 /root/.ssh && printf %s "$1" > /root/.ssh/authorized_keys'
        machine.run("sh", "-c", authorize, "sh", public)
        yield machine
    finally:
        run("podman", "rm", "--force", "--time=10", name, check=False)


def _remove_machines_of_ended_runs():
    """A run that was killed leaves its machines behind."""
    listed = run("podman", "ps", "--all", f"--filter=label={_RUN_LABEL}", "--format=json").stdout
    for machine in json.loads(listed or "null") or []:
        if not Path("/proc", machine["Labels"][_RUN_LABEL]).exists():
            run("podman", "rm", "--force", "--ignore", "--time=5", *machine["Names"], check=False)


def _log_of(name):
    log = run("podman", "logs", "--tail=30", name, check=False)
    return log.stdout + log.stderr


def wait_until_booted(run_there, log, limit=HANG_S, alive=lambda: True):
    """Wait until systemd has started all; `run_there` runs a command on the machine, `log` tells what it said."""
    deadline = time.monotonic() + limit
    while True:
        state = run_there("systemctl", "is-system-running", check=False).stdout.strip()
        if state in {"running", "degraded"}:
            return
        if not alive() or time.monotonic() > deadline:
            raise AssertionError(f"the machine did not boot; it is {state or 'silent'}:\n{log()[-3000:]}")
        time.sleep(0.5)
