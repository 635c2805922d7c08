"""What a model's name stands for (a catalog entry, a hub repository, local files), and which files are needed of it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from worker_node.core.errors import BadRequest, ModelNotFound, SourceRejected
from worker_node.models.catalog import Catalog, CatalogEntry, HubReference, SourceFormat, as_id, normalise_name
from worker_node.models.convert.job import files_of_task
from worker_node.models.directory import GENERATION_FILES, MODEL_FILE, WEIGHTS_FILE

ACCEPTED = "a name of the catalog, ORG/REPO[@REVISION][:QUANTIZATION] of a hub, or a local path"

_HUB_PREFIXES = ("hf:", "https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")
_REPOSITORY = re.compile(
    r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)"
    r"(?:/tree/(?P<tree>[\w./-]+))?(?:@(?P<revision>[\w./-]+))?(?::(?P<tag>[\w.-]+))?"
)


@dataclass(frozen=True, slots=True)
class LocalReference:
    path: Path

    @property
    def model_id(self) -> str:
        return as_id(self.path.resolve().name.removesuffix(".gguf"))

    @property
    def alias(self) -> str:
        return normalise_name(str(self.path.resolve()))

    def __str__(self) -> str:
        return f"local {self.path.name}"


# What is not in the catalog.
ForeignReference = HubReference | LocalReference
Reference = CatalogEntry | ForeignReference


def parse_reference(name: str, catalog: Catalog) -> Reference:
    """What `name` stands for, the catalog first; makes no network calls. Raises ModelNotFound, BadRequest."""
    name = name.strip()
    if (entry := catalog.find(name)) is not None:
        return entry
    if (reference := foreign_reference(name)) is not None:
        return reference
    hint = catalog.suggest(name) or f"; a model is {ACCEPTED}"
    raise ModelNotFound(
        f"model {name[:200]!r} is not known{hint} (npu-node list --all shows the catalog)", param="model"
    )


def foreign_reference(name: str) -> ForeignReference | None:
    """As `parse_reference` without the catalog; None when the name has none of the forms. Raises BadRequest."""
    if not is_local(name):
        return hub_reference(name)
    try:
        path = Path(name).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError, RuntimeError) as error:
        # Too long, a null byte, links in a circle, a user that there is not, a directory that may not be read.
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadRequest(f"{name[:200]!r} cannot be a file of this machine: {why}", param="model") from None
    return LocalReference(path)


def is_local(name: str) -> bool:
    """Whether a name that is not of the catalog stands for files of this machine. Looks at no file."""
    if "://" in name or hub_reference(name) is not None:
        return False
    relative = ("~", "./", "../", f".{os.sep}", f"..{os.sep}")
    # On Windows `/models/x` has a root and no drive, and is not absolute.
    return bool(Path(name).root) or name.startswith(relative) or name.endswith(".gguf") or name in {".", ".."}


def is_below(name: str, roots: Iterable[Path]) -> bool:
    """Whether a name is an absolute path into one of the directories, with all links resolved."""
    path = Path(name)
    try:
        if not path.is_absolute() or (_is_share(path) and path.drive not in {root.drive for root in roots}):
            return False
        return any(path.resolve().is_relative_to(root.resolve()) for root in roots)
    except (OSError, ValueError, RuntimeError):
        # Too long, a null byte, links in a circle.
        return False


def is_foreign(name: str) -> bool:
    """Whether the name has the form of a source that can be pulled without the catalog.

    Looks at no file: requests may name any path as their model, and must not learn from the answer what is there.
    """
    return is_local(name.strip()) or hub_reference(name.strip()) is not None


def _is_share(path: Path) -> bool:
    r"""Whether a path is that of a share of another machine, as `\\machine\share\x`; nothing is one on Linux.

    Windows sends credentials of its user to the machine of a share that a program looks at.
    """
    return path.drive.startswith("\\\\")


def alias_of(name: str) -> str:
    """The form in which names of installed models are compared. Requests choose the name: no share is looked at."""
    if _is_share(path := Path(name.strip())):
        return normalise_name(str(path))
    try:
        reference = foreign_reference(name.strip())
    except BadRequest:
        reference = None
    return normalise_name(name) if reference is None else reference.alias


def hub_reference(name: str) -> HubReference | None:
    """The hub repository that `name` stands for; None if it has another form."""
    rest = name.removesuffix(":latest")
    prefix = next((p for p in _HUB_PREFIXES if rest.lower().startswith(p)), "")
    rest = rest[len(prefix) :]
    # A name without a prefix that ends in .gguf is a file of this machine.
    if not prefix and (rest.startswith((".", "~")) or rest.endswith(".gguf")):
        return None
    found = _REPOSITORY.fullmatch(rest.rstrip("/"))
    if found is None or ".." in rest:
        return None
    return HubReference(found["repo"], found["revision"] or found["tree"] or "main", found["tag"])


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file: `size` in bytes, and the declared hash (hex): sha256, or that of the git object."""

    path: str
    size: int
    sha256: str | None = None
    git_sha1: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit; `gguf` and `architectures` are what the hub says of them."""

    name: str
    revision: str
    files: tuple[RemoteFile, ...]
    licence: str = "unknown"
    gguf: dict[str, Any] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()


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
# One of several parts, or the projector of a vision model.
_NOT_WHOLE = re.compile(r"-\d{5}-of-\d{5}\.gguf$|mmproj", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Selection:
    format: SourceFormat
    files: tuple[RemoteFile, ...]


def safetensors_of(names: Collection[str]) -> list[str]:
    """The files of a directory with its weights: one, or all shards; none where one is missing."""
    if SAFETENSORS_FILE in names:
        return [SAFETENSORS_FILE]
    shards = {name: int(found[1]) for name in names if (found := _SHARD.fullmatch(name))}
    return sorted(shards) if set(shards.values()) == {len(shards)} else []


def weight_files(directory: Path) -> list[Path]:
    return [directory / name for name in safetensors_of([path.name for path in directory.iterdir()])]


def select(listing: Listing, tag: str | None = None, form: SourceFormat | None = None) -> Selection:
    """Choose the files in the `form` of the catalog, else the first that there is; GGUF last, unless a `tag` asks."""
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
        return Selection(SourceFormat.GGUF, (_choose_gguf(listing, ggufs, tag),))

    kinds = (".safetensors", ".bin", ".pt", ".pth", ".onnx", ".h5", ".msgpack")
    if not (unknown := [name for name in top if name.endswith(kinds)]):
        raise SourceRejected(f"{listing.name} holds no model: no OpenVINO, GGUF or safetensors file at its top")
    raise SourceRejected(
        f"{listing.name} holds weights ({min(unknown)}{' …' if len(unknown) > 1 else ''}) in a form that cannot "
        f"be converted here: OpenVINO directories, GGUF files and BERT encoders in {SAFETENSORS_FILE} can. Look for a "
        f"repository of the same model that ends in -ov or -GGUF, or {EXPORT}"
    )


def _openvino(listing: Listing, top: dict[str, RemoteFile]) -> Selection:
    if MODEL_FILE not in top:
        graphs = ", ".join(sorted(name for name in top if name.endswith(".xml")))
        raise SourceRejected(
            f"{listing.name} holds {graphs}, a kind of model which this node does not serve: text generation and "
            f"embedding models have one {MODEL_FILE}"
        )
    encoder = (MODEL_FILE, WEIGHTS_FILE, "tokenizer.json", "config.json")
    needed = GENERATION_FILES if "openvino_detokenizer.xml" in top else encoder
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
    whole = [file for file in ggufs if not _NOT_WHOLE.search(file.path)]
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
