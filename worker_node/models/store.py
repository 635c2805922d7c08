"""The models on this machine: `<root>/<id>/`, each complete or not there at all.

Everything is made in a hidden directory beside its target, flushed to disk, and renamed in one step. A lock per model,
which the kernel frees when its holder dies, keeps two pulls from doing the same work, and tells a directory that is
being made from one that was left behind. Directories elsewhere (`path` in `[[models]]`) are opened where they are, and
never changed: `open_directory`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from worker_node.core.environment import cache_home
from worker_node.core.errors import (
    BadRequest,
    ConfigurationError,
    ConversionFailed,
    DownloadFailed,
    ModelError,
    ModelNotFound,
)
from worker_node.core.operating_system import flush, lock, try_lock
from worker_node.core.types import ModelKind
from worker_node.models.catalog import Catalog, CatalogEntry, Quantization, SourceFormat, as_id, normalise_name
from worker_node.models.convert.job import recognised, special_file
from worker_node.models.directory import (
    MANIFEST_FILE,
    MODEL_FILE,
    InstalledModel,
    has_manifest,
    peek_config,
    read_config,
    read_directory,
    read_facts,
)
from worker_node.models.disk import storage_problem
from worker_node.models.progress import Progress
from worker_node.models.pull import PullSpec, has_changed, prepare
from worker_node.models.sources import (
    SAFETENSORS_FILE,
    LocalReference,
    alias_of,
    foreign_reference,
    is_foreign,
    parse_reference,
    weight_files,
)

log = logging.getLogger(__name__)

STORE_VARIABLE = "NPU_NODE_MODEL_STORE"

# A directory has the name, and while it is made one with more around it: file systems take 255 bytes.
_ID_LIMIT = 128
_ID = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{_ID_LIMIT - 1}}}")


def default_store_root() -> Path:
    if root := os.environ.get(STORE_VARIABLE):
        return Path(root).expanduser()
    return cache_home() / "npu-node" / "models"


class ModelStore:
    """Finds, makes and removes models under one root; several processes may use it at once."""

    def __init__(self, root: Path | None = None, catalog: Catalog | None = None) -> None:
        """Raises ConfigurationError unless `root` is a readable directory, or not there yet."""
        self.root = default_store_root() if root is None else root
        try:
            os.scandir(self.root).close()
        except PermissionError as error:
            raise ConfigurationError(f"the model store: {storage_problem(error)}") from None
        except OSError as error:
            # Windows calls what is below a file "not found".
            if isinstance(error, NotADirectoryError) or any(path.is_file() for path in (self.root, *self.root.parents)):
                raise ConfigurationError(
                    f"the model store {self.root} is not a directory; set {STORE_VARIABLE} (or --model-store) to one"
                ) from None
            # It is not there yet, or the code that uses it reports what is wrong.
        self.catalog = Catalog.load() if catalog is None else catalog

    def directories(self) -> list[Path]:
        """Every directory that is, claims to be, or may hide a model. Raises PermissionError if the root is closed."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.scandir(self.root).close()  # from Python 3.13 on, glob finds nothing in a closed directory
        found = [*self.root.glob(f"*/{MANIFEST_FILE}"), *self.root.glob(f"*/{MODEL_FILE}")]
        closed = {path for path in self.root.glob("*/") if _ID.fullmatch(path.name) and not os.access(path, os.X_OK)}
        return sorted({path.parent for path in found if not path.parent.name.startswith(".")} | closed)

    def installed(self) -> list[InstalledModel]:
        """Every model that is ready to load, by id; damaged ones are left out and logged."""
        models: list[InstalledModel] = []
        for path in self.directories():
            try:
                models.append(read_directory(path))
            except ConfigurationError as error:
                log.warning("a model is left out: %s", error.message)
        return models

    def locate(self, name: str) -> Path:
        """The directory of the installed model of that id or alias, damaged or not. Raises ModelNotFound."""
        directory = self._directory(name)
        if directory is None:
            hint = self.catalog.suggest(name, [path.name for path in self.directories()])
            raise ModelNotFound(f"model {name[:200]!r} is not installed{hint}", param="model")
        return directory

    def get(self, name: str, served: Iterable[str] = ()) -> InstalledModel:
        """The installed model of that id or alias. `served` names others, for the error. Raises ModelNotFound."""
        directory = self._directory(name)
        if directory is not None:
            return read_directory(directory)
        if (entry := self.catalog.find(name)) is not None or is_foreign(name):
            wanted = name if entry is None else entry.id
            raise ModelNotFound(
                f"model {wanted[:200]} is not installed; get it with: npu-node pull {wanted[:200]}", param="model"
            )
        here = sorted({path.name for path in self.directories()}.union(served))
        hint = self.catalog.suggest(name, here) or self.catalog.suggest(name)
        hint = hint or f"; models here: {', '.join(here) or 'none'}"
        raise ModelNotFound(f"model {name[:200]!r} is not known{hint}", param="model")

    def pull_spec(
        self,
        name: str,
        *,
        model_id: str | None = None,
        quantization: Quantization | None = None,
        device: str | None = None,
    ) -> PullSpec:
        """What a pull of `name` would make; `model_id` None is the source's own name. Makes no network calls.

        With a `quantization` other than the catalog's it is installed beside the usual one, as `<id>-<form>`, and so is
        the form that suits a `device`, as `<id>-<device>`.
        Raises ModelNotFound, and BadRequest for a name that is not possible or the catalog's.
        """
        reference = parse_reference(name, self.catalog)
        if isinstance(reference, CatalogEntry):
            default = reference.id
            if device is None and quantization in {None, reference.quantization}:
                quantization = None
            elif reference.format is not SourceFormat.GGUF:
                raise BadRequest(
                    f"{reference.id} comes as {reference.quantization}; only GGUF models leave a choice",
                    param="quantization",
                )
            else:
                default = f"{reference.id}-{device or quantization}"
        else:
            default = reference.model_id

        chosen = default if model_id is None else normalise_name(model_id)
        if _ID.fullmatch(chosen) is None:
            raise BadRequest(
                f"{chosen[:_ID_LIMIT]!r} cannot be a model's name: up to {_ID_LIMIT} letters, digits, dots, - and _; "
                "choose one with npu-node pull --name",
                param="name",
            )

        owner = self.catalog.find(chosen)
        if owner is not None and owner is not reference:
            config = peek_config(reference.path / "config.json") if isinstance(reference, LocalReference) else {}
            # The directory of a published model keeps the name that it was published under, never the catalog's own.
            if model_id is not None or not owner.describes(config):
                sizes = {"layers": config.get("num_hidden_layers"), "wide": config.get("hidden_size")}
                found = [str(config.get("model_type", "another model")), *(f"{n} {of}" for of, n in sizes.items() if n)]
                raise BadRequest(
                    f"the name {chosen} belongs to {owner.source} of the catalog, and {name[:200]} is "
                    f"{', '.join(found)[:200]}; choose another name with npu-node pull --name",
                    param="name",
                )
        return PullSpec(reference, chosen, quantization=quantization, device=device, name=name)

    def find(self, spec: PullSpec) -> InstalledModel | None:
        """What a pull would make, if it is there. Raises ConversionFailed for another model of its name."""
        target = self.root / spec.model_id
        if not has_manifest(target):
            if target.exists():
                raise ConfigurationError(
                    f"{target} exists but is not a model of this store; move it away and pull again"
                )
            return None
        model, reference = read_directory(target), spec.reference
        if isinstance(reference, CatalogEntry):
            return model

        if reference.alias not in model.aliases or spec.quantization not in {None, model.quantization}:
            raise ConversionFailed(
                f"{target} exists, made from {model.source}; choose another name with --name, or remove it: npu-node "
                f"rm {model.id}"
            )
        if isinstance(reference, LocalReference) and has_changed(reference, model):
            raise ConversionFailed(
                f"{reference.path} has changed since {model.id} was made of it; pull it under another name "
                f"with --name, or remove that one first: npu-node rm {model.id}"
            )
        return model

    def pull(self, spec: PullSpec | str, progress: Progress | None = None) -> InstalledModel:
        """Download, verify and convert a model unless it is installed. Raises a ModelError, or as `pull_spec`."""
        if isinstance(spec, str):
            spec = self.pull_spec(spec)
        try:
            return self.find(spec) or self._install(spec, progress or Progress())
        except OSError as error:
            if (problem := storage_problem(error)) is None:
                raise
            raise DownloadFailed(f"{spec.model_id}: {problem}") from error

    def remove(self, name: str) -> None:
        directory = self.locate(name)
        with exclusive(self.root, directory.name):
            if directory.is_dir():
                discard(directory, directory.name)

    def _directory(self, name: str) -> Path | None:
        """By id or alias, else by source; of several models of a source, the one that is called as it is."""
        entry, directories = self.catalog.find(name), self.directories()
        wanted = {normalise_name(name), entry.id if entry else normalise_name(name)}
        for path in directories:
            if path.name.lower() in wanted:
                return path

        alias = alias_of(name)
        same = [path for path in directories if alias in read_facts(path).aliases]
        if len(same) > 1 and (reference := foreign_reference(name)) is not None:
            same.sort(key=lambda path: path.name != reference.model_id)
        return same[0] if same else None

    def _install(self, spec: PullSpec, progress: Progress) -> InstalledModel:
        """Make the model, alone of all processes, unless another one has made it by then."""
        self.root.mkdir(parents=True, exist_ok=True)
        sweep(self.root)
        with exclusive(self.root, spec.model_id, on_wait=lambda: progress.stage("waiting for another process")):
            if (installed := self.find(spec)) is not None:
                return installed
            target = self.root / spec.model_id
            # What arrives outlives a pull that fails, so that the next continues.
            work, fetched = partial(self.root, spec.model_id), self.root / _DOWNLOADS / spec.model_id
            try:
                publish(prepare(spec, fetched, work, progress), target)
                shutil.rmtree(fetched, ignore_errors=True)
            finally:
                shutil.rmtree(work, ignore_errors=True)
                for path in (fetched, fetched.parent):
                    with contextlib.suppress(OSError):  # something is in it
                        path.rmdir()
        return read_directory(target)


_LOCKS = ".locks"
_DOWNLOADS = ".downloads"
# Partial downloads that were not continued within this time are removed.
_KEPT_S = 7 * 86400.0
_PARTIAL = re.compile(r"^\.partial-(?P<id>.+)-\d+$")


@contextmanager
def exclusive(root: Path, model_id: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of one model, waiting for it; `on_wait` is called first when another process holds it."""
    with _lock_file(root, model_id) as file:
        if not try_lock(file):
            if on_wait is not None:
                on_wait()
            lock(file)
        yield


def partial(root: Path, model_id: str) -> Path:
    """A new hidden directory to make the model in; the caller holds the model's lock."""
    directory = root / f".partial-{model_id}-{os.getpid()}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def publish(directory: Path, target: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        flush(path)
    flush(directory)
    directory.rename(target)
    flush(target.parent)


def discard(target: Path, model_id: str) -> None:
    """Remove a model: it vanishes in one step, and is deleted after; the caller holds the model's lock."""
    doomed = partial(target.parent, model_id)
    # Into it, since Windows renames nothing onto a directory that is there.
    target.rename(doomed / target.name)
    shutil.rmtree(doomed)


def sweep(root: Path) -> None:
    """Remove what dead pulls left behind, downloads that broke off after a week: until then they can be continued."""
    for path in root.glob(f"{_DOWNLOADS}/*"):
        with _lock_file(root, path.name) as file:
            if not try_lock(file):
                continue
            written = max(found.lstat().st_mtime for found in (path, *path.rglob("*")))
            if time.time() - written > _KEPT_S:
                shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".partial-*"):
        if (match := _PARTIAL.match(path.name)) is None:
            continue
        with _lock_file(root, match["id"]) as file:
            if try_lock(file):
                shutil.rmtree(path, ignore_errors=True)


def _lock_file(root: Path, model_id: str) -> IO[str]:
    # The file stays for good: removing it would let two processes lock two files of one name.
    (root / _LOCKS).mkdir(parents=True, exist_ok=True)
    return (root / _LOCKS / f"{model_id}.lock").open("a")


# Raised when the same files would be prepared in another way.
_VERSION = 3
_LOGITS = re.compile(rb'names="[^"]*\blogits\b')
_LABEL_LENGTH = 64


def open_directory(
    path: Path,
    name: str,
    prepared: Path,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
) -> InstalledModel:
    """Return the model of a directory anywhere on this machine, under `name`.

    What has to be made of an encoder is kept in a store of its own, `prepared`. `pooling` and `normalize` count where
    the files do not specify them. Raises ConfigurationError, naming the file that is missing or cannot be used.
    """
    if not path.is_dir():
        raise ConfigurationError(f"{path} is not a directory")
    if (special := special_file(path)) is not None:
        raise ConfigurationError(special)
    path = path.resolve()
    known = None if (path / MANIFEST_FILE).is_file() else recognised(path)
    if known is not None and (opened := known[1].open(path, name)) is not None:
        return opened
    if (path / MANIFEST_FILE).is_file() or (known is None and _generates(path)):
        found = replace(read_directory(path), id=name)
        if found.kind == ModelKind.EMBEDDING and (pooling, normalize) != (None, None):
            raise ConfigurationError(
                f"{path / MANIFEST_FILE}: the model has its own pooling; remove pooling and normalize"
            )
        return found

    if not (path / MODEL_FILE).is_file() and not weight_files(path) and known is None:
        raise ConfigurationError(
            f"{path}: holds neither {MODEL_FILE} nor {SAFETENSORS_FILE}; npu-node pull makes a model of a GGUF "
            "file, optimum-cli export openvino of other published models"
        )

    kind = ModelKind.EMBEDDING if known is None else known[0]
    # Names, sizes and times of the files that decide: hashing gigabytes at every start would take seconds.
    decisive = [file for file in sorted((*path.glob("*.*"), *path.glob("*/config.json"))) if file.is_file()]
    stamps = [(str(file.relative_to(path)), it.st_size, it.st_mtime_ns) for file in decisive if (it := file.stat())]
    identity = repr((_VERSION, str(path), kind, pooling, normalize, stamps))
    label = as_id(name)[:_LABEL_LENGTH]
    model_id = f"{label}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"

    source = LocalReference(path)
    spec = PullSpec(source, model_id, kind=kind, pooling=pooling, normalize=normalize)
    try:
        prepared.mkdir(parents=True, exist_ok=True)
        store = ModelStore(prepared)
        made = store.pull(spec)
        for old in prepared.glob(f"{label}-" + "[0-9a-f]" * 16):
            if old != made.path and source.alias in read_facts(old).aliases:
                store.remove(old.name)
    except ModelError as error:
        raise ConfigurationError(error.message) from error
    except OSError as error:
        raise ConfigurationError(f"{prepared} cannot be written ({error.strerror}); set compile_cache") from error
    return replace(made, id=name, source=f"directory {path}", aliases=())


def apparent_kind(directory: Path) -> str | None:
    """The kind of model that the small files of a directory show, whatever is wrong with the others."""
    if (kind := read_facts(directory).kind) is not None:
        return kind
    if (known := recognised(directory)) is not None:
        return known[0]
    with contextlib.suppress(ConfigurationError, OSError):
        names = _architectures(directory)
        if any(name.endswith("ForCausalLM") for name in names):
            return ModelKind.GENERATION
        if any(name.endswith("Model") for name in names):
            return ModelKind.EMBEDDING
    made_for = {"generation_config.json": ModelKind.GENERATION, "modules.json": ModelKind.EMBEDDING}
    return next((kind for name, kind in made_for.items() if (directory / name).is_file()), None)


def _generates(path: Path) -> bool:
    """Whether it is an OpenVINO model that ends in the probabilities of tokens."""
    graph = path / MODEL_FILE
    if not graph.is_file() or _LOGITS.search(graph.read_bytes()) is None:
        return False
    names = _architectures(path)
    if any(name.endswith("Classification") for name in names):
        raise ConfigurationError(
            f"{path}: {', '.join(names)} classifies texts; only embedding and generation are served"
        )
    return True


def _architectures(directory: Path) -> list[str]:
    return [str(name) for name in read_config(directory / "config.json").get("architectures") or ()]
