"""What a pull would take and give, found out from listings and small files: nothing large is downloaded."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker_node.core.errors import SourceRejected
from worker_node.devices.memory import available_memory
from worker_node.models.catalog import CatalogEntry, PackageSource, SourceFormat
from worker_node.models.directory import peek_config
from worker_node.models.npu_rules import weights_problem
from worker_node.models.prepare import PullSpec, fetch_small
from worker_node.models.sources.disk import free_space, in_gigabytes
from worker_node.models.sources.downloads import list_repository
from worker_node.models.sources.reference import HubReference, LocalReference, Reference, hub_repository
from worker_node.models.sources.selection import conversion_needs, select

# Memory of a loaded model, by the size of its weights; the conversations come on top.
_SCALES = {SourceFormat.GGUF: 1.1, SourceFormat.SAFETENSORS: 2.0, SourceFormat.OPENVINO: 1.1, SourceFormat.TASK: 2.0}
_DETOKENIZER = "openvino_detokenizer.xml"

_ALTERNATIVE = "repositories that end in -int4-cw-ov are made for NPUs"


@dataclass(frozen=True, slots=True)
class Suitability:
    """`suitable` is None where nobody can tell before it is tried; `reasons` in words."""

    suitable: bool | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Sizes in bytes. `files` are those that a pull fetches; `memory_to_convert` and `_to_run` are estimates."""

    model_id: str
    source: str
    format: SourceFormat
    files: dict[str, int]
    disk_needed: int
    disk_available: int
    memory_to_convert: int
    memory_to_run: int
    memory_available: int | None
    context: int | None
    npu: Suitability
    licence: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """What a source says of itself; `stored` is how its openvino_config.json says that the weights are stored."""

    name: str
    format: SourceFormat
    files: dict[str, int]
    generates: bool
    context: int | None = None
    stored: Mapping[str, Any] = field(default_factory=dict)
    licence: str = "unknown"


def check(spec: PullSpec, store: Path) -> Report:
    """Find out what the pull would need. Raises what the pull would raise before its first large file."""
    source = _look(spec.reference)
    total = sum(source.files.values())
    needs = conversion_needs(source.format, total, movable=True)
    disk = needs.disk + total
    available, free = available_memory(), free_space(store)
    problems = []
    if disk > free:
        problems.append(f"disk: it needs {in_gigabytes(disk)}, {in_gigabytes(free)} are free (NPU_NODE_MODEL_STORE)")
    if needs.memory > available:
        problems.append(
            f"memory: to convert it needs {in_gigabytes(needs.memory)}, {in_gigabytes(available)} are available"
        )
    return Report(
        model_id=spec.model_id,
        source=source.name,
        format=source.format,
        files=source.files,
        disk_needed=disk,
        disk_available=free,
        memory_to_convert=needs.memory,
        memory_to_run=int(_SCALES[source.format] * total),
        memory_available=available,
        context=source.context,
        npu=npu_verdict(source.format, source.stored, generates=source.generates),
        licence=source.licence,
        problems=tuple(problems),
    )


def _look(reference: Reference) -> _Source:
    if (repository := hub_repository(reference)) is not None:
        return _of_hub(repository)
    if isinstance(reference, LocalReference):
        raise SourceRejected(f"{reference.path}: --check is about what would be downloaded; pull the files themselves")
    assert isinstance(reference, CatalogEntry)  # noqa: S101
    source = reference.source
    assert isinstance(source, PackageSource)  # noqa: S101
    return _Source(
        str(source),
        reference.format,
        {str(source): source.size},
        generates=reference.dimensions is None,
        context=reference.context_limit,
        licence=reference.licence,
    )


def _of_hub(reference: HubReference) -> _Source:
    listing = list_repository(reference)
    selection = select(listing, reference.tag, reference.form)
    files = {file.path: file.size for file in selection.files}
    with tempfile.TemporaryDirectory() as room:
        fetch_small(reference, listing, selection, Path(room))
        context, stored = _read_configs(Path(room))
    if selection.format is SourceFormat.GGUF:
        context = listing.gguf.get("context_length")
    generates = selection.format is SourceFormat.GGUF or _DETOKENIZER in files
    name = f"hub {reference.repo}@{listing.revision}"
    return _Source(name, selection.format, files, generates, context, stored, listing.licence)


def _read_configs(directory: Path) -> tuple[int | None, dict[str, Any]]:
    """The context of config.json and the quantization of openvino_config.json, as far as they say them."""
    context = peek_config(directory / "config.json").get("max_position_embeddings")
    stored = peek_config(directory / "openvino_config.json").get("quantization_config")
    return context if isinstance(context, int) else None, stored if isinstance(stored, dict) else {}


def npu_verdict(source_format: SourceFormat, stored: Mapping[str, Any], *, generates: bool) -> Suitability:
    """Judge a model by `stored`, the `quantization_config` of its openvino_config.json."""
    if not generates:
        return Suitability(True, ("an encoder: it runs in f16 with static shapes",))
    if source_format is SourceFormat.GGUF:
        return Suitability(True, ("converted here to int4 and int8, symmetric",))
    bits, symmetric = stored.get("bits"), stored.get("sym")
    if bits is None:
        return Suitability(None, (f"nothing says how the weights are stored; {_ALTERNATIVE}",))
    noted = (stored.get("group_size"), stored.get("ratio"))
    group, ratio = (str(value) if isinstance(value, int | float) else None for value in noted)
    # What serving refuses is not called suitable here.
    problem = weights_problem(f"int{bits}_{'sym' if symmetric else 'asym'}", group, ratio)
    if problem is not None:
        return Suitability(False, (f"{problem}; {_ALTERNATIVE}",))
    return Suitability(True, (f"int{bits} symmetric, {'channel-wise' if group == '-1' else f'in groups of {group}'}",))
