"""Runs a conversion in a process of its own and waits for it."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from worker_node.core.environment import native_environment
from worker_node.core.errors import ConversionFailed
from worker_node.models.catalog import CatalogEntry, HubSource, Quantization
from worker_node.models.convert.job import ConversionGivenUp, ConversionJob, ConversionStage, Done, Message
from worker_node.models.progress import Progress
from worker_node.models.sources.arrival import Arrived, fetch_from_url, fetch_hub, find_local
from worker_node.models.sources.disk import require_space
from worker_node.models.sources.packages import fetch_package
from worker_node.models.sources.reference import HubReference, Reference, UrlReference
from worker_node.models.sources.selection import conversion_needs
from worker_node.models.tether import tethered

_LOG_TAIL = 800

_MODULE = "worker_node.models.convert"


def convert(job: ConversionJob, progress: Progress) -> None:
    """Make the model directory that the job describes.

    Raises ConversionFailed when the files cannot be converted, the packages for it are missing, or the
    process dies.
    """
    log = Path(job.scratch) / "conversion.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(  # noqa: S603 (our own program)
            tethered([sys.executable, "-m", _MODULE]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**native_environment(), "TMPDIR": job.scratch},
        ) as process,
    ):
        try:
            last = _follow(process, job, progress)
        except BaseException:
            process.kill()
            raise
    match last:
        case ConversionGivenUp(message):
            raise ConversionFailed(message)
        case Done() if process.returncode == 0:
            return
    tail = log.read_text(errors="replace")[-_LOG_TAIL:].strip()
    raise ConversionFailed(
        f"{job.id}: the conversion process {_ending(process.returncode)}: {tail or 'it said nothing'}"
    )


def _follow(process: subprocess.Popen[bytes], job: ConversionJob, progress: Progress) -> Message | None:
    stdin, stdout = _pipe(process.stdin), _pipe(process.stdout)
    try:
        stdin.write(msgspec.json.encode(job))
        stdin.close()
    except BrokenPipeError:
        pass  # it died before it read its job; how is told below
    last: Message | None = None
    decoder = msgspec.json.Decoder(Message)
    for line in stdout:
        last = decoder.decode(line)
        if isinstance(last, ConversionStage):
            progress.stage(last.name)
    return last


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise AssertionError("the process was started with pipes")
    return stream


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


# The way from published files to a model directory: fetch or find, verify, convert.


@dataclass(frozen=True, slots=True)
class Wish:
    """What to make: a model called `model_id`, which the user chose if `named`; None is what the source says.

    `insecure_no_hash` takes a URL's file unverified.
    """

    reference: Reference
    model_id: str
    kind: str | None = None
    quantization: Quantization | None = None
    insecure_no_hash: bool = False
    named: bool = False

    @property
    def spelling(self) -> str:
        """A name that stands for exactly this source."""
        return self.reference.id if isinstance(self.reference, CatalogEntry) else self.reference.spelling


def prepare(wish: Wish, downloads: Path, work: Path, progress: Progress) -> Path:
    """Make a model's directory under `work`, and return it; raises a NodeError when a step fails.

    What is downloaded stays in `downloads`, so that the next try continues where this one ended.
    """
    scratch, target = work / "scratch", work / "model"
    for room in (scratch, target, downloads):
        room.mkdir(parents=True, exist_ok=True)
    arrived = _fetch(wish, downloads, work, progress)
    entry = wish.reference if isinstance(wish.reference, CatalogEntry) else None
    job = ConversionJob(
        source=str(arrived.directory),
        target=str(target),
        scratch=str(scratch),
        id=wish.model_id,
        format=arrived.format,
        licence=arrived.licence if entry is None else entry.licence,
        origin=arrived.origin,
        source_sha256=arrived.hashes,
        movable=arrived.movable,
        kind=wish.kind if entry is None else entry.kind,
        family=None if entry is None else entry.family,
        quantization=wish.quantization or (None if entry is None else entry.quantization),
        context_limit=None if entry is None else entry.context_limit,
        canary=None if entry is None else entry.canary,
        max_prompt_len=None if entry is None else entry.max_prompt_len,
        prompts={} if entry is None else entry.prompts,
        matryoshka=() if entry is None else entry.matryoshka,
        aliases=() if isinstance(wish.reference, CatalogEntry) else (wish.reference.alias,),
    )
    convert(job, progress)
    return target


def _fetch(wish: Wish, downloads: Path, work: Path, progress: Progress) -> Arrived:
    reference = wish.reference
    if isinstance(reference, HubReference):
        return fetch_hub(reference, downloads, progress)
    if isinstance(reference, UrlReference):
        return fetch_from_url(reference, downloads, progress, insecure_no_hash=wish.insecure_no_hash)
    if not isinstance(reference, CatalogEntry):
        return find_local(reference, downloads, progress)
    source = reference.source
    if isinstance(source, HubSource):
        return fetch_hub(HubReference(source.repo, source.revision, source.tag), downloads, progress, source.files)
    files, scratch = work / "source", work / "package"
    files.mkdir()
    scratch.mkdir()
    size = source.size
    require_space(work.parent, size + conversion_needs(reference.format, size, movable=True).disk, reference.id)
    hashes = fetch_package(source, files, scratch, progress)
    return Arrived(files, reference.format, hashes, str(source), reference.licence)
