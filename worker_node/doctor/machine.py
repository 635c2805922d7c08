"""The machine that is examined, and what a check finds.

What is read of a machine is below a root that tests may put elsewhere.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from worker_node.core.environment import native_environment
from worker_node.core.operating_system import WINDOWS, group_name

# Where distributions and Intel's packages put libraries.
LIBRARY_DIRECTORIES = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib", "lib/x86_64-linux-gnu")
_DPKG_STATUS = "var/lib/dpkg/status"


class ExaminedMachine:
    """Files below `root`, the user's rights, and the kernel's log where that could be read.

    Paths are given without a leading slash. Nothing raises: what cannot be read is None or empty.
    """

    environment: Mapping[str, str] = os.environ

    def __init__(self, root: Path = Path("/"), kernel_log: str | None = None) -> None:
        self.root = root
        self.kernel_log = kernel_log

    def read(self, path: str) -> str | None:
        """The text of a file, stripped."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()

    def find(self, directory: str, pattern: str) -> list[Path]:
        return sorted((self.root / directory).glob(pattern))

    def link_name(self, path: str) -> str | None:
        """The last part of what a symbolic link points to."""
        try:
            return (self.root / path).readlink().name
        except OSError:
            return None

    def library(self, *patterns: str) -> Path | None:
        found = (path for d in LIBRARY_DIRECTORIES for pattern in patterns for path in self.find(d, pattern))
        return next(found, None)

    def in_container(self) -> bool:
        """Whether this is a container, whose kernel and firmware are the host's."""
        return self.exists("run/.containerenv") or self.exists(".dockerenv") or self.in_kubernetes()

    def in_kubernetes(self) -> bool:
        return "KUBERNETES_SERVICE_HOST" in self.environment

    def system(self) -> str:
        """The distribution and its version, as Ubuntu 24.04; empty where it is not known."""
        lines = (self.read("etc/os-release") or "").splitlines()
        fields = dict(line.split("=", 1) for line in lines if "=" in line)
        return " ".join(fields.get(name, "").strip('"') for name in ("NAME", "VERSION_ID")).strip()

    def package_versions(self, *names: str) -> dict[str, str]:
        """The versions of those Debian packages that are installed."""
        versions: dict[str, str] = {}
        for block in (self.read(_DPKG_STATUS) or "").split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and line[0] != " ")
            if fields.get("Package") in names and fields.get("Status", "").endswith(" installed"):
                versions[fields["Package"]] = fields.get("Version", "")
        return versions

    def kernel_release(self) -> str:
        return self.read("proc/sys/kernel/osrelease") or ""

    def user(self) -> str:
        return str(psutil.Process().username())

    def group_of(self, path: str) -> str | None:
        """The name, or the number, of the group that owns a file."""
        try:
            number = (self.root / path).stat().st_gid
        except OSError:
            return None
        return group_name(number)

    def open_error(self, path: str) -> OSError | None:
        """Why this process cannot open a file to read and write; None if it can.

        It is tried, since a container may hold a device that its rights allow and its rules forbid.
        """
        try:
            os.close(os.open(self.root / path, os.O_RDWR))
        except OSError as problem:
            return problem
        return None

    def may_use(self, path: str) -> bool:
        """Whether this process may open a file to read and write, free or not."""
        problem = self.open_error(path)
        if problem is None or isinstance(problem, PermissionError):
            return problem is None
        return os.access(self.root / path, os.R_OK | os.W_OK)


def read_kernel_log() -> str | None:
    """What dmesg shows; None where it is missing or this user may not read it."""
    if WINDOWS:
        return None
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=10, check=True, env=native_environment())  # noqa: S607
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


class Severity(StrEnum):
    """`error`: the NPU cannot be used, or not be proven. `warning`: it works worse, or may stop working."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """`id` is stable; `fix` is what to type or do, empty where nothing is wrong."""

    id: str
    severity: Severity
    found: str
    fix: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Severity.OK, found)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Severity.WARNING, found, fix)


def error(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Severity.ERROR, found, fix)
