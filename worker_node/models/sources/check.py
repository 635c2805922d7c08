"""What a pull would take and give, found out from listings and small files: nothing large is downloaded."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker_node.core.errors import DownloadFailed
from worker_node.devices.memory import available_memory
from worker_node.models.catalog import HubSource, SourceFormat
from worker_node.models.directory import WEIGHTS_FILE, peek_config, sizes
from worker_node.models.prepare import PullSpec, fetch_configs, local_format
from worker_node.models.sources.disk import free_space, in_gigabytes
from worker_node.models.sources.downloads import list_repository
from worker_node.models.sources.reference import HubReference, LocalReference, Reference, UrlReference
from worker_node.models.sources.selection import conversion_needs, select

# Tokens of the conversation for which the memory of a loaded model is estimated.
_TOKENS = 4096
_KV_BYTES = 2
_SCALES = {SourceFormat.GGUF: 1.1, SourceFormat.SAFETENSORS: 2.0, SourceFormat.OPENVINO: 1.1, SourceFormat.TASK: 2.0}
_DETOKENIZER = "openvino_detokenizer.xml"

# What the NPU compiler takes for generation: int4, symmetric, one scale a row or groups of a multiple of this.
_GROUP = 64
# Those of the models that were run on the NPU path, or are published for NPUs.
_HEAD_SIZES = frozenset({64, 80, 96, 128})
_ALTERNATIVE = "NPUs want int4 symmetric, channel-wise or in groups: look for -int4-cw-ov"


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
    """What a source says of itself; `config` and `weights` are of its config.json and openvino_config.json."""

    name: str
    format: SourceFormat
    files: dict[str, int]
    generates: bool
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)
    licence: str = "unknown"


def check(spec: PullSpec, store: Path) -> Report:
    """Find out what the pull would need. Raises what the pull would raise before its first large file."""
    source, local = _look(spec.reference), isinstance(spec.reference, LocalReference)
    total = sum(source.files.values())
    weights_size = source.files.get(WEIGHTS_FILE, total) if local else total
    needs = conversion_needs(source.format, weights_size, movable=not local)
    disk = needs.disk + (0 if local else total)
    context = _whole(source.config, "max_position_embeddings")
    memory_to_run = int(_SCALES[source.format] * weights_size) + _kv_cache(source.config, context)
    available, free = available_memory(), free_space(store)
    problems = []
    if disk > free:
        problems.append(f"disk: it needs {in_gigabytes(disk)}, {in_gigabytes(free)} are free (NPU_NODE_MODEL_STORE)")
    for purpose, needed in (("convert", needs.memory), ("run", memory_to_run)):
        if available is not None and needed > available:
            problems.append(
                f"memory: to {purpose} it needs {in_gigabytes(needed)}, {in_gigabytes(available)} are available"
            )
    return Report(
        model_id=spec.model_id,
        source=source.name,
        format=source.format,
        files=source.files,
        disk_needed=disk,
        disk_available=free,
        memory_to_convert=needs.memory,
        memory_to_run=memory_to_run,
        memory_available=available,
        context=context,
        npu=npu_verdict(source.format, source.weights, generates=source.generates, head_size=_head_size(source.config)),
        licence=source.licence,
        problems=tuple(problems),
    )


def _look(reference: Reference) -> _Source:
    if isinstance(reference, HubReference):
        return _of_hub(reference)
    if isinstance(reference, UrlReference):
        return _of_url(reference)
    if isinstance(reference, LocalReference):
        return _of_files(reference)
    source = reference.source
    if isinstance(source, HubSource):
        return _of_hub(HubReference(source.repo, source.revision, source.tag))
    return _Source(
        str(source),
        reference.format,
        {str(source): source.size},
        generates=reference.dimensions is None,
        config={"max_position_embeddings": reference.context_limit},
        licence=reference.licence,
    )


def _of_hub(reference: HubReference) -> _Source:
    listing = list_repository(reference)
    selection = select(listing, reference.tag)
    files = {file.path: file.size for file in selection.files}
    with tempfile.TemporaryDirectory() as room:
        fetch_configs(reference, listing, selection, Path(room))
        config, weights = _read_configs(Path(room))
    if selection.format is SourceFormat.GGUF:
        config = {"max_position_embeddings": listing.gguf.get("context_length")}
    generates = selection.format is SourceFormat.GGUF or _DETOKENIZER in files
    name = f"hub {reference.repo}@{listing.revision}"
    return _Source(name, selection.format, files, generates, config, weights, listing.licence)


def _of_url(reference: UrlReference) -> _Source:
    import httpx2  # noqa: PLC0415  (as in `downloads`)

    try:
        found = httpx2.head(reference.url, follow_redirects=True, timeout=10.0)
    except httpx2.HTTPError as error:
        raise DownloadFailed(f"{reference.url}: {type(error).__name__}: {error}") from error
    if found.status_code != 200:
        raise DownloadFailed(f"{reference.url}: the server answered {found.status_code}")
    size = int(found.headers.get("content-length", 0))
    return _Source(str(reference), SourceFormat.GGUF, {reference.file_name: size}, generates=True)


def _of_files(reference: LocalReference) -> _Source:
    path, source_format = reference.path, local_format(reference.path)
    files = sizes(path) if path.is_dir() else {path.name: path.stat().st_size}
    config, weights = _read_configs(path)
    generates = source_format is SourceFormat.GGUF or _DETOKENIZER in files
    return _Source(str(reference), source_format, files, generates, config, weights)


def _read_configs(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    weights = peek_config(directory / "openvino_config.json").get("quantization_config")
    return peek_config(directory / "config.json"), weights if isinstance(weights, dict) else {}


def _whole(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None


def _head_size(config: Mapping[str, Any]) -> int | None:
    heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    return _whole(config, "head_dim") or (hidden // heads if heads and hidden else None)


def _kv_cache(config: Mapping[str, Any], context: int | None) -> int:
    """Bytes of keys and values of a conversation, in f16; 0 where the sizes are not known."""
    heads = _whole(config, "num_key_value_heads") or _whole(config, "num_attention_heads") or 0
    layers, tokens = _whole(config, "num_hidden_layers") or 0, min(context or _TOKENS, _TOKENS)
    return 2 * layers * heads * (_head_size(config) or 0) * tokens * _KV_BYTES


def npu_verdict(
    source_format: SourceFormat, weights: Mapping[str, Any], *, generates: bool, head_size: int | None
) -> Suitability:
    """Judge a model by `weights`, the `quantization_config` of its openvino_config.json."""
    if not generates:
        return Suitability(suitable=True, reasons=("an encoder: it runs in f16 with static shapes",))
    suitable, reason = _weights(source_format, weights)
    reasons = [reason]
    if head_size is not None and head_size not in _HEAD_SIZES:
        suitable = None if suitable else suitable
        reasons.append(f"head size {head_size} was not tried on NPUs ({', '.join(map(str, sorted(_HEAD_SIZES)))} were)")
    return Suitability(suitable, tuple(reasons))


def _weights(source_format: SourceFormat, weights: Mapping[str, Any]) -> tuple[bool | None, str]:
    if source_format is SourceFormat.GGUF:
        return True, f"converted here to int4 and int8, symmetric, in groups of {_GROUP}"
    bits, symmetric, group = weights.get("bits"), weights.get("sym"), weights.get("group_size")
    if bits is None:
        return None, f"nothing says how the weights are stored; {_ALTERNATIVE}"
    if bits != 4:
        return False, f"the weights have {bits} bits; {_ALTERNATIVE}"
    if not symmetric:
        return False, f"the weights are int4 asymmetric; {_ALTERNATIVE}"
    if group == -1:
        return True, "int4 symmetric, channel-wise"
    fits = isinstance(group, int) and group > 0 and group % _GROUP == 0
    return fits, f"int4 symmetric in groups of {group}" + ("" if fits else f", which is not a multiple of {_GROUP}")
