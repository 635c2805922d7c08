"""What a model's name stands for: an entry of the catalog, a hub repository, or local files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from worker_node.core.errors import BadRequest, ModelNotFound
from worker_node.models.catalog import Catalog, CatalogEntry, HubSource, SourceFormat, normalise_name

ACCEPTED = "a name of the catalog, ORG/REPO[@REVISION][:QUANTIZATION] of a hub, or a local path"

_HUB_PREFIXES = ("hf:", "https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")
_REPOSITORY = re.compile(
    r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)"
    r"(?:/tree/(?P<tree>[\w./-]+))?(?:@(?P<revision>[\w./-]+))?(?::(?P<tag>[\w.-]+))?"
)
_NOT_OF_AN_ID = re.compile(r"[^a-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository of a model hub; `tag` selects one of its GGUF files by quantization or file name.

    `form` is what the catalog says of its files; None: the repository decides.
    """

    repo: str
    revision: str = "main"
    tag: str | None = None
    form: SourceFormat | None = None

    def __str__(self) -> str:
        return f"hub {self.repo}@{self.revision}" + (f":{self.tag}" if self.tag else "")

    @property
    def model_id(self) -> str:
        """The model's directory in the store, unless the user chooses another name."""
        name = self.repo.rpartition("/")[2]
        return _as_id(f"{name}-{self.tag}" if self.tag else name)

    @property
    def alias(self) -> str:
        """The name under which the installed model is found, however it was spelled."""
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return normalise_name(self.repo + revision + (f":{self.tag}" if self.tag else ""))


@dataclass(frozen=True, slots=True)
class LocalReference:
    """A file or directory of this machine."""

    path: Path

    @property
    def model_id(self) -> str:
        """See `HubReference.model_id`."""
        return _as_id(self.path.resolve().name.removesuffix(".gguf"))

    @property
    def alias(self) -> str:
        """See `HubReference.alias`."""
        return normalise_name(str(self.path.resolve()))

    def __str__(self) -> str:
        return f"local {self.path.name}"


# What is not in the catalog.
ForeignReference = HubReference | LocalReference
Reference = CatalogEntry | ForeignReference


def hub_repository(reference: Reference) -> HubReference | None:
    """The repository that a reference stands for; None for packages and local files."""
    if isinstance(reference, CatalogEntry) and isinstance(source := reference.source, HubSource):
        return HubReference(source.repo, source.revision, source.tag, reference.format)
    return reference if isinstance(reference, HubReference) else None


def parse_reference(name: str, catalog: Catalog) -> Reference:
    """What `name` stands for; names of the catalog come first. Makes no network calls.

    Raises ModelNotFound when it has none of the known forms, BadRequest for a path that cannot be.
    """
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
    return _local(name) if is_local(name) else hub_reference(name)


def is_local(name: str) -> bool:
    """Whether a name that is not of the catalog stands for files of this machine. Looks at no file."""
    if "://" in name or hub_reference(name) is not None:
        return False
    return name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf") or name in {".", ".."}


def is_below(name: str, roots: Iterable[Path]) -> bool:
    """Whether a name is an absolute path into one of the directories, with all links resolved."""
    try:
        return Path(name).is_absolute() and any(Path(name).resolve().is_relative_to(root.resolve()) for root in roots)
    except (OSError, ValueError, RuntimeError):
        # Too long, a null byte, links in a circle.
        return False


def is_foreign(name: str) -> bool:
    """Whether the name has the form of a source that can be pulled without the catalog.

    Looks at no file: requests may name any path as their model, and must not learn from the answer what is there.
    """
    return is_local(name.strip()) or hub_reference(name.strip()) is not None


def alias_of(name: str) -> str:
    """The form in which the names of installed models are compared, whatever the spelling of their source."""
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


def _local(name: str) -> LocalReference:
    try:
        path = Path(name).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError, RuntimeError) as error:
        # Too long, a null byte, links in a circle, a user that there is not, a directory that may not be read.
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadRequest(f"{name[:200]!r} cannot be a file of this machine: {why}", param="model") from None
    return LocalReference(path)


def _as_id(name: str) -> str:
    return _NOT_OF_AN_ID.sub("-", name.lower()).strip("-._") or "model"
