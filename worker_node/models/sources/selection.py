"""What a source holds and needs, before anything large of it is downloaded; decides what is fetched and converted."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from worker_node.core.errors import ConversionFailed, SourceRejected
from worker_node.devices.memory import available_memory
from worker_node.models.catalog import SourceFormat
from worker_node.models.convert.job import files_of_task
from worker_node.models.directory import GENERATION_FILES, MODEL_FILE, WEIGHTS_FILE
from worker_node.models.sources.disk import in_gigabytes, require_space


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file: `size` in bytes, and the hash that its source declares (hex): sha256 or that of the git object."""

    path: str
    size: int
    sha256: str | None = None
    git_sha1: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one version. `revision` is the commit; `licence` the declared one; `gguf` the hub's own summary of
    its GGUF files (architecture, context_length), where it has one; `architectures` those of its config.json."""

    name: str
    revision: str
    files: tuple[RemoteFile, ...]
    licence: str = "unknown"
    gguf: dict[str, Any] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()

    def find(self, path: str) -> RemoteFile | None:
        """The file of that path, or None."""
        return next((file for file in self.files if file.path == path), None)


SAFETENSORS_FILE = "model.safetensors"
_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
EXPORT = "export the original model with optimum-cli export openvino (docs/models.md has the command)"
# Small files that say what a model is; they are read before anything large is fetched.
CONFIG_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "openvino_config.json",
        "tokenizer_config.json",
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
    }
)
# In this order where the user names none: 4 bits keep the file small, 8 bits are what every repository has.
DEFAULT_TAGS = ("Q4_K_M", "Q8_0")

_OPENVINO_SUFFIXES = frozenset({".xml", ".json", ".jinja"})
_ENCODER_FILES = ("tokenizer.json", "config.json")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PROJECTOR = "mmproj"


@dataclass(frozen=True, slots=True)
class Selection:
    """The files to fetch, and the conversion that they need."""

    format: SourceFormat
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Bytes of the files together."""
        return sum(file.size for file in self.files)


def safetensors_of(names: Collection[str]) -> list[str]:
    """Those of a directory's files that hold its weights: one, or all shards; none where one is missing."""
    if SAFETENSORS_FILE in names:
        return [SAFETENSORS_FILE]
    shards = {name: int(found[1]) for name in names if (found := _SHARD.fullmatch(name))}
    return sorted(shards) if set(shards.values()) == {len(shards)} else []


def weight_files(directory: Path) -> list[Path]:
    """As `safetensors_of`, of a local directory."""
    return [directory / name for name in safetensors_of([path.name for path in directory.iterdir()])]


def select(listing: Listing, tag: str | None = None, form: SourceFormat | None = None) -> Selection:
    """Choose the files of a repository, in the `form` that its catalog entry names, else in the first that it holds.

    GGUF files come last, unless a `tag` asks for one: beside other forms they are extras.
    Raises SourceRejected with the reason and a command that helps.
    """
    top = {file.path: file for file in listing.files if "/" not in file.path}
    ggufs = [file for file in listing.files if file.path.lower().endswith(".gguf")]
    forms = set(SourceFormat) if form is None else {form}
    if tag is not None:
        forms = {SourceFormat.GGUF}
    if SourceFormat.TASK in forms and (wanted := files_of_task(listing.name, listing.architectures, top)) is not None:
        return Selection(SourceFormat.TASK, tuple(f for f in listing.files if f.path in wanted | CONFIG_FILES))
    graphs = any(name.startswith("openvino_") and name.endswith(".xml") for name in top)
    if SourceFormat.OPENVINO in forms and graphs and (MODEL_FILE in top or not ggufs):
        return _openvino(listing, top)
    weights = safetensors_of(top)
    if SourceFormat.SAFETENSORS in forms and weights and "modules.json" in top:
        needed = {*weights, "tokenizer.json", *CONFIG_FILES}
        return Selection(SourceFormat.SAFETENSORS, tuple(f for f in listing.files if f.path in needed))
    if SourceFormat.GGUF in forms and (ggufs or tag is not None):
        if (architecture := listing.gguf.get("architecture")) is not None:
            require_known_architecture(str(architecture), listing.name)
        return Selection(SourceFormat.GGUF, (_choose_gguf(listing, ggufs, tag),))
    raise _unusable(listing, top)


def _openvino(listing: Listing, top: dict[str, RemoteFile]) -> Selection:
    if MODEL_FILE not in top:
        graphs = ", ".join(sorted(name for name in top if name.endswith(".xml")))
        raise SourceRejected(
            f"{listing.name} holds {graphs}, a kind of model which this node does not serve: text generation and "
            f"embedding models have one {MODEL_FILE}"
        )
    needed = GENERATION_FILES if "openvino_detokenizer.xml" in top else (MODEL_FILE, WEIGHTS_FILE, *_ENCODER_FILES)
    if missing := [name for name in needed if name not in top]:
        raise SourceRejected(f"{listing.name} lacks {', '.join(missing)}, so it cannot be loaded as it is; {EXPORT}")
    wanted = tuple(
        file
        for file in listing.files
        if file.path in CONFIG_FILES
        or ("/" not in file.path and PurePosixPath(file.path).suffix in _OPENVINO_SUFFIXES)
        or (file.path in top and file.path.startswith("openvino_") and file.path.endswith(".bin"))
    )
    return Selection(SourceFormat.OPENVINO, wanted)


def _choose_gguf(listing: Listing, ggufs: list[RemoteFile], tag: str | None) -> RemoteFile:
    whole = [file for file in ggufs if _PROJECTOR not in file.path.lower() and not _SPLIT.search(file.path)]
    for wanted in (tag,) if tag else DEFAULT_TAGS:
        # After a mark: Q4_0 is not IQ4_0.
        ending = re.compile(rf"(?:.*[-._/])?{re.escape(wanted)}(?:\.gguf)?", re.IGNORECASE)
        if (found := next((file for file in whole if ending.fullmatch(file.path)), None)) is not None:
            return found
    if tag is None and len(whole) == 1:
        return whole[0]
    if not whole:
        split = " in one piece (split files cannot be read; there are some)" if ggufs else ""
        raise SourceRejected(f"{listing.name} holds no GGUF file{split}; leave the quantization out of the name")
    wanted = f"has no {tag}" if tag else f"has neither {' nor '.join(DEFAULT_TAGS)}"
    names = ", ".join(sorted(file.path for file in whole))
    raise SourceRejected(f"{listing.name} {wanted}; it has {names}: add the end of a name, as :Q6_K")


def _unusable(listing: Listing, top: dict[str, RemoteFile]) -> SourceRejected:
    weights = [n for n in top if n.endswith((".safetensors", ".bin", ".pt", ".pth", ".onnx", ".h5", ".msgpack"))]
    if not weights:
        return SourceRejected(f"{listing.name} holds no model: no OpenVINO, GGUF or safetensors file at its top")
    return SourceRejected(
        f"{listing.name} holds weights ({min(weights)}{' …' if len(weights) > 1 else ''}) in a form that cannot "
        f"be converted here: OpenVINO directories, GGUF files and BERT encoders in {SAFETENSORS_FILE} can. Look for a "
        f"repository of the same model that ends in -ov or -GGUF, or {EXPORT}"
    )


# Those whose graph by OpenVINO's front end computes what llama.cpp does: a test compares each.
ARCHITECTURES = ("llama", "qwen2", "qwen3")


def require_known_architecture(architecture: str, name: str) -> None:
    """Raises SourceRejected unless models of this architecture can be converted."""
    if architecture not in ARCHITECTURES:
        raise SourceRejected(
            f"{name} is a GGUF file of architecture {architecture or 'unknown'!r}; those that can be converted are "
            f"{', '.join(ARCHITECTURES)}. Look for a repository of the same model that ends in -ov "
            "(npu-node list --all shows some)"
        )


_GIGABYTE = 10**9


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of memory at the peak, and bytes of disk beside the published files."""

    memory: int
    disk: int


def conversion_needs(source_format: SourceFormat, size: int, *, movable: bool) -> Needs:
    """Estimate for weights of `size` bytes; `movable` files are moved where they need no change.

    The factors are upper bounds of what was measured (docs/performance.md).
    """
    match source_format:
        case SourceFormat.GGUF:
            return Needs(memory=3 * size + _GIGABYTE, disk=2 * size)
        case SourceFormat.SAFETENSORS | SourceFormat.TASK:
            # Half-precision weights become twice as large: encoders are kept in float32.
            return Needs(memory=4 * size + _GIGABYTE // 2, disk=int(2.2 * size))
        case _:
            return Needs(memory=_GIGABYTE // 2, disk=0 if movable else size)


def require_resources(
    source_format: SourceFormat, size: int, room: Path, what: str, *, movable: bool, to_fetch: int = 0
) -> None:
    """Raise DownloadFailed (disk) or ConversionFailed (memory), with both figures, when a conversion does not fit."""
    needs = conversion_needs(source_format, size, movable=movable)
    require_space(room, needs.disk + to_fetch, what)
    available = available_memory()
    if needs.memory > available:
        raise ConversionFailed(
            f"not enough memory to convert {what}: it takes up to {in_gigabytes(needs.memory)}, "
            f"{in_gigabytes(available)} are available; stop other programs, choose a smaller file, "
            "or convert it on a larger machine and copy the directory"
        )
