"""Machines for the roles: containers that boot systemd, made of nothing but a distribution's own packages."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu-node" / "ops"
TOOLS = ("podman", "runc", "mmdebstrap")
_PACKAGES = (
    "ca-certificates,dbus,dbus-user-session,init,iproute2,kmod,libpam-systemd,procps,python3,python3-apt,"
    "systemd,systemd-sysv,udev"
)
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
_BUILD_TIMEOUT_S = 600
_BOOT_TIMEOUT_S = 90


@dataclass(frozen=True, slots=True)
class Distribution:
    """`python` is the version of its python3, for which wheels are needed."""

    name: str
    suite: str
    python: str


DEBIAN_12 = Distribution("debian12", "bookworm", "3.11")
DEBIAN_13 = Distribution("debian13", "trixie", "3.13")


def missing_tools():
    """What this machine lacks for such containers, in words; None if nothing."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install podman runc mmdebstrap netavark aardvark-dns)"
    if os.geteuid() != 0:
        return "containers that boot systemd need root here"
    return None


def run(*command, timeout=60, check=True, **options):
    """Run a command to its end; its output is in the error when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
    if check and done.returncode:
        raise AssertionError(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done


def image(distribution):
    """The image of a distribution, made once and kept; its name."""
    recipe = f"{distribution.suite} {_PACKAGES}"
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    name = f"localhost/npu-ops-{distribution.name}:{digest}"
    if run("podman", "image", "exists", name, check=False).returncode == 0:
        return name
    CACHE.mkdir(parents=True, exist_ok=True)
    archive = CACHE / f"{distribution.name}-{digest}.tar"
    if not archive.exists():
        part = archive.with_suffix(".part.tar")
        run(
            "mmdebstrap",
            "--variant=minbase",
            f"--include={_PACKAGES}",
            '--aptopt=Acquire::Check-Valid-Until "false"',
            distribution.suite,
            str(part),
            timeout=_BUILD_TIMEOUT_S,
        )
        part.rename(archive)
    run("podman", "import", str(archive), name, timeout=_BUILD_TIMEOUT_S)
    return name


@dataclass(frozen=True, slots=True)
class Machine:
    """A booted container; `address` is its own, reached from this machine alone."""

    name: str
    address: str
    distribution: Distribution

    def run(self, *command, timeout=120, check=True):
        """Run a command in it."""
        return run("podman", "exec", self.name, *command, timeout=timeout, check=check)


@contextlib.contextmanager
def booted(distribution, *mounts, name):
    """A machine that runs while the block does. `mounts` are podman's `--volume` values."""
    run("podman", "rm", "--force", "--time=5", "--ignore", name)
    run(
        "podman",
        "run",
        "--detach",
        *_FLAGS,
        f"--name={name}",
        f"--hostname={name}",
        *(f"--volume={mount}" for mount in mounts),
        image(distribution),
        *_INIT,
        timeout=120,
    )
    try:
        _wait_until_running(name)
        address = run("podman", "inspect", "--format={{.NetworkSettings.IPAddress}}", name).stdout.strip()
        yield Machine(name, address, distribution)
    finally:
        run("podman", "rm", "--force", "--time=10", name, timeout=60, check=False)


def _wait_until_running(name):
    deadline = time.monotonic() + _BOOT_TIMEOUT_S
    while True:
        state = run("podman", "exec", name, "systemctl", "is-system-running", check=False).stdout.strip()
        if state in {"running", "degraded"}:
            return
        if time.monotonic() > deadline:
            log = run("podman", "logs", "--tail=30", name, check=False)
            raise AssertionError(f"{name} did not boot; it is {state or 'silent'}:\n{log.stdout}{log.stderr}")
        time.sleep(0.5)
