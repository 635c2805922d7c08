"""What a pull would take and give, found out from listings and small files: nothing large is downloaded."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from worker_node.core.errors import DownloadFailed
from worker_node.devices.memory import available_memory
from worker_node.models.catalog import CatalogEntry, HubSource, SourceFormat
from worker_node.models.directory import WEIGHTS_FILE, sizes
from worker_node.models.prepare import PullSpec
from worker_node.models.sources.disk import free_space, in_gigabytes
from worker_node.models.sources.downloads import list_repository
from worker_node.models.sources.fetch import choose_files, fetch_configs, local_format
from worker_node.models.sources.reference import HubReference, LocalReference, UrlReference
from worker_node.models.sources.selection import conversion_needs

# Tokens of the conversation for which the memory of a loaded model is estimated.
_TOKENS = 4096
_KV_BYTES = 2
_SCALES = {SourceFormat.GGUF: 1.1, SourceFormat.SAFETENSORS: 2.0, SourceFormat.OPENVINO: 1.1}


# What the NPU compiler takes for generation: int4, symmetric, one scale a row or groups of a multiple of this.
_GROUP = 64
# Those of the models that were run on the NPU path, or are published for NPUs.
_HEAD_SIZES = frozenset({64, 80, 96, 128})
_MARKS = (
    (re.compile(r"int4-cw|int4-sym|int4_sym|int4-gq|sym[_-]?(cw|g128)", re.IGNORECASE), True, "int4 symmetric"),
    (re.compile(r"nf4", re.IGNORECASE), True, "nf4, which NPUs take from Lunar Lake on"),
    (re.compile(r"int4-asym|int4_asym", re.IGNORECASE), False, "int4 asymmetric"),
    (re.compile(r"int8|fp16|fp8|bf16", re.IGNORECASE), False, "not int4"),
)
_ALTERNATIVE = "NPUs want int4 symmetric, channel-wise or in groups: look for -int4-cw-ov"


@dataclass(frozen=True, slots=True)
class Suitability:
    """`suitable` is None where nobody can tell before it is tried; `reasons` in words."""

    suitable: bool | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the configuration says of the model; None where it does not."""

    context: int | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None

    def kv_cache(self, tokens: int) -> int:
        """Bytes of keys and values for that many tokens, in f16; 0 where the sizes are not known."""
        if self.layers is None or self.kv_heads is None or self.head_size is None:
            return 0
        return 2 * self.layers * self.kv_heads * self.head_size * tokens * _KV_BYTES


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
    licence: str = "unknown"
    problems: tuple[str, ...] = field(default=())


def check(spec: PullSpec, store: Path) -> Report:
    """Find out what the pull would need. Raises what the pull would raise before its first large file."""
    reference = spec.reference
    with tempfile.TemporaryDirectory() as room:
        if isinstance(reference, HubReference):
            return _check_hub(spec, reference, (), store, Path(room))
        if isinstance(reference, UrlReference):
            return _check_url(spec, reference, store)
        if isinstance(reference, LocalReference):
            return _check_local(spec, reference, store)
        if isinstance(reference.source, HubSource):
            source = reference.source
            hub = HubReference(source.repo, source.revision, source.tag)
            return _check_hub(spec, hub, source.files, store, Path(room))
    source_size = reference.source.size
    return _report(
        spec,
        str(reference.source),
        reference.format,
        {str(reference.source): source_size},
        source_size,
        store,
        Shape(context=reference.context_limit),
        licence=reference.licence,
    )


def _check_hub(spec: PullSpec, reference: HubReference, patterns: tuple[str, ...], store: Path, room: Path) -> Report:
    listing = list_repository(reference)
    selection = choose_files(reference, listing, patterns)
    fetch_configs(reference, listing, selection, room)
    files = {file.path: file.size for file in selection.files}
    config = _json(room / "config.json")
    shape = _shape_of_config(config)
    if selection.format is SourceFormat.GGUF:
        shape = Shape(context=_whole(listing.gguf, "context_length"))
    weights = _json(room / "openvino_config.json").get("quantization_config") or {}
    generates = selection.format is not SourceFormat.SAFETENSORS and (
        selection.format is SourceFormat.GGUF or "openvino_detokenizer.xml" in files
    )
    return _report(
        spec,
        f"hub {reference.repo}@{listing.revision}",
        selection.format,
        files,
        sum(files.values()),
        store,
        shape,
        weights=weights,
        generates=generates,
        licence=listing.licence,
    )


def _check_url(spec: PullSpec, reference: UrlReference, store: Path) -> Report:
    import httpx2  # noqa: PLC0415  (as in `downloads`)

    try:
        found = httpx2.head(reference.url, follow_redirects=True, timeout=10.0)
    except httpx2.HTTPError as error:
        raise DownloadFailed(f"{reference.url}: {type(error).__name__}: {error}") from error
    if found.status_code != 200:
        raise DownloadFailed(f"{reference.url}: the server answered {found.status_code}")
    size = int(found.headers.get("content-length", 0))
    return _report(
        spec, str(reference), SourceFormat.GGUF, {reference.file_name: size}, size, store, Shape(), generates=True
    )


def _check_local(spec: PullSpec, reference: LocalReference, store: Path) -> Report:
    path = reference.path
    source_format = local_format(path)
    files = sizes(path) if path.is_dir() else {path.name: path.stat().st_size}
    weights = _json(path / "openvino_config.json").get("quantization_config") or {}
    return _report(
        spec,
        str(reference),
        source_format,
        files,
        files.get(WEIGHTS_FILE, sum(files.values())),
        store,
        _shape_of_config(_json(path / "config.json")),
        weights=weights,
        generates=source_format is SourceFormat.GGUF or "openvino_detokenizer.xml" in files,
    )


def _report(
    spec: PullSpec,
    source: str,
    source_format: SourceFormat,
    files: dict[str, int],
    weights_size: int,
    store: Path,
    shape: Shape,
    *,
    weights: Mapping[str, Any] | None = None,
    generates: bool | None = None,
    licence: str = "unknown",
) -> Report:
    local = isinstance(spec.reference, LocalReference)
    needs = conversion_needs(source_format, weights_size, movable=not local)
    disk = needs.disk + (0 if local else sum(files.values()))
    memory_to_run = int(_SCALES[source_format] * weights_size) + shape.kv_cache(min(shape.context or _TOKENS, _TOKENS))
    available, free = available_memory(), free_space(store)
    problems = []
    if disk > free:
        problems.append(f"disk: it needs {in_gigabytes(disk)}, {in_gigabytes(free)} are free (NPU_NODE_MODEL_STORE)")
    for purpose, needed in (("convert", needs.memory), ("run", memory_to_run)):
        if available is not None and needed > available:
            problems.append(
                f"memory: to {purpose} it needs {in_gigabytes(needed)}, {in_gigabytes(available)} are available"
            )
    entry = spec.reference if isinstance(spec.reference, CatalogEntry) else None
    generates = (entry is not None and entry.dimensions is None) if generates is None else generates
    return Report(
        model_id=spec.model_id,
        source=source,
        format=source_format,
        files=files,
        disk_needed=disk,
        disk_available=free,
        memory_to_convert=needs.memory,
        memory_to_run=memory_to_run,
        memory_available=available,
        context=shape.context,
        npu=npu_verdict(source, source_format, weights or {}, generates=generates, head_size=shape.head_size),
        licence=licence,
        problems=tuple(problems),
    )


def _shape_of_config(config: Mapping[str, Any]) -> Shape:
    heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    return Shape(
        context=_whole(config, "max_position_embeddings"),
        layers=_whole(config, "num_hidden_layers"),
        kv_heads=_whole(config, "num_key_value_heads") or heads,
        head_size=_whole(config, "head_dim") or (hidden // heads if heads and hidden else None),
    )


def _whole(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None


def _json(path: Path) -> dict[str, Any]:
    """The file, or nothing where it is missing or something else: it only informs."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return {}


def npu_verdict(
    name: str, source_format: SourceFormat, weights: Mapping[str, Any], *, generates: bool, head_size: int | None
) -> Suitability:
    """Judge a model by its repository's `name`, and by `weights`, the `quantization_config` of openvino_config.json."""
    if not generates:
        return Suitability(suitable=True, reasons=("an encoder: it runs in f16 with static shapes",))
    suitable, reason = _weights(name, source_format, weights)
    reasons = [reason]
    if head_size is not None and head_size not in _HEAD_SIZES:
        suitable = None if suitable else suitable
        reasons.append(f"head size {head_size} was not tried on NPUs ({', '.join(map(str, sorted(_HEAD_SIZES)))} were)")
    return Suitability(suitable, tuple(reasons))


def _weights(name: str, source_format: SourceFormat, weights: Mapping[str, Any]) -> tuple[bool | None, str]:
    if source_format is SourceFormat.GGUF:
        return True, f"converted here to int4 and int8, symmetric, in groups of {_GROUP}"
    bits, symmetric, group = weights.get("bits"), weights.get("sym"), weights.get("group_size")
    if bits is None:
        return _by_name(name)
    if bits != 4:
        return False, f"the weights have {bits} bits; {_ALTERNATIVE}"
    if not symmetric:
        return False, f"the weights are int4 asymmetric; {_ALTERNATIVE}"
    if group == -1:
        return True, "int4 symmetric, channel-wise"
    fits = isinstance(group, int) and group > 0 and group % _GROUP == 0
    return fits, f"int4 symmetric in groups of {group}" + ("" if fits else f", which is not a multiple of {_GROUP}")


def _by_name(name: str) -> tuple[bool | None, str]:
    for mark, suitable, words in _MARKS:
        if mark.search(name):
            return suitable, f"by its name: {words}" + ("" if suitable else f"; {_ALTERNATIVE}")
    return None, "nothing says how the weights are stored; most repositories that end in -int4-ov are asymmetric"
