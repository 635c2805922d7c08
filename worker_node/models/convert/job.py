"""One conversion: its job, its result and the manifest; and what tasks with models of their own contribute."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import ClassVar, cast

import msgspec

from worker_node.core.errors import ConfigurationError, ConversionFailed, SourceRejected
from worker_node.models.catalog import CatalogEntry, Quantization, SourceFormat
from worker_node.models.directory import (
    MANIFEST_VERSION,
    TOKENIZER_FILE,
    InstalledModel,
    Manifest,
    content_hash,
    describe_export,
    read_config,
    runtime_problem,
    sizes,
    write_manifest,
)
from worker_node.registry import load, tasks

# Of the files that engines read of a directory in OpenVINO form.
EXPORTED_SUFFIXES = frozenset({".xml", ".bin", ".json", ".jinja"})


class ConversionJob(msgspec.Struct, frozen=True, kw_only=True):
    """Make a model directory in `target`, which is empty, of `source`: a directory, or a GGUF file.

    What is None is read from the files. `pooling` (an `embedding.Pooling`) and `normalize` count for encoders whose
    files do not specify them. The facts of the catalog's `entry` go before those of the files, but for what encoders
    declare. `movable` files may be moved out of `source`. A GGUF file without a `quantization` gets the form that
    suits the `device`, `npu` or `cpu`.
    """

    source: str
    target: str
    scratch: str
    id: str
    format: SourceFormat
    licence: str
    origin: str
    source_sha256: dict[str, str]
    movable: bool = False
    kind: str | None = None
    quantization: Quantization | None = None
    device: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    aliases: tuple[str, ...] = ()
    entry: CatalogEntry | None = None


@dataclass(frozen=True, slots=True)
class Converted:
    """What only a conversion knows of the model that it made."""

    kind: str
    family: str
    quantization: str
    context_limit: int
    dimensions: int | None = None
    space: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    matryoshka: tuple[int, ...] = ()


_MAKERS = ("openvino", "openvino-genai", "gguf", "safetensors")


def perform(job: ConversionJob, stage: Callable[[str], None]) -> None:
    """Make the model directory that the job describes. Raises a NodeError."""
    if (newer := runtime_problem(Path(job.source), metadata.version("openvino"))) is not None:
        raise ConversionFailed(f"{newer}: update the node, or take an export of its version or an older one")
    if job.device is not None and job.format is not SourceFormat.GGUF:
        raise ConversionFailed(f"{job.id}: --for chooses the form of GGUF files; leave it out, this is none")
    # Each maker imports what it needs: an encoder does not wait for GenAI.
    if job.format is SourceFormat.TASK:
        found = recognised(Path(job.source))
        if found is None:
            raise ConversionFailed(f"{job.id}: no task of this node recognises the files any more; try again")
        converted = found[1].convert(job, stage)
    elif job.format is SourceFormat.GGUF:
        from worker_node.models.convert.gguf import convert_gguf  # noqa: PLC0415

        converted = convert_gguf(job, stage)
    else:
        from worker_node.models.convert.embedding import adopt, convert_encoder  # noqa: PLC0415

        converted = (adopt if job.format is SourceFormat.OPENVINO else convert_encoder)(job, stage)
    if job.kind not in (None, converted.kind):
        raise ConversionFailed(f"{job.id}: the files are a model for {converted.kind}, not for {job.kind}")
    target, facts = Path(job.target), asdict(converted)
    if (entry := job.entry) is not None:
        facts |= {"family": entry.family, "canary": entry.canary, "max_prompt_len": entry.max_prompt_len}
        facts["context_limit"] = min(converted.context_limit, entry.context_limit)
    manifest = Manifest(
        version=MANIFEST_VERSION,
        id=job.id,
        licence=job.licence,
        source=job.origin,
        source_sha256=job.source_sha256,
        files=sizes(target),
        made_with={name: metadata.version(name) for name in _MAKERS},
        aliases=job.aliases,
        content=None if converted.space is None else content_hash(target, TOKENIZER_FILE),
        **facts,
    )
    write_manifest(target, manifest)


def copy_export(job: ConversionJob, known: InstalledModel, stage: Callable[[str], None]) -> Converted:
    """Copy the files of a directory in OpenVINO form as they are; those that are ours are moved."""
    if job.quantization is not None and job.entry is None:
        raise ConversionFailed(f"{job.id}: the weights are compressed already; leave the quantization out")
    stage("copying the files")
    for path in sorted(Path(job.source).iterdir()):
        if path.is_file() and path.suffix in EXPORTED_SUFFIXES:
            # shutil.move would keep a link; what is not ours to move is copied.
            (shutil.move if job.movable else shutil.copyfile)(path, Path(job.target) / path.name)
    return Converted(known.kind, known.family, known.quantization, known.context_limit)


class ModelFiles(ABC):
    """The published forms of one task's models. Its objects have no state."""

    @abstractmethod
    def recognises(self, source: Path) -> bool:
        """Whether a file or directory is such a model. Reads small files only, and raises nothing."""

    @abstractmethod
    def weights(self, source: Path) -> list[Path]:
        """The files whose hashes and sizes stand for the model."""

    def of_repository(
        self, _repository: str, _architectures: Collection[str], _names: Collection[str]
    ) -> Collection[str] | None:
        """The files to fetch besides small ones; None without such a model. Raises SourceRejected for missing ones."""
        return None

    def check(self, _directory: Path) -> None:  # noqa: B027
        """Raise ConversionFailed for what the small files of a directory show that cannot be converted."""

    @abstractmethod
    def convert(self, job: ConversionJob, stage: Callable[[str], None]) -> Converted:
        """Make the model's directory. Raises ConversionFailed, naming the file and the option."""

    def open(self, _directory: Path, _name: str) -> InstalledModel | None:
        """The model of a directory that can be served as it is, else None. Raises ConfigurationError for damage."""
        return None


class ExportedFiles(ModelFiles):
    """Models taken in OpenVINO form with all `needed` files; `limit` is the context if none is configured."""

    kind: ClassVar[str]
    graph: ClassVar[str]
    needed: ClassVar[tuple[str, ...]]
    limit: ClassVar[int | None] = None
    advice: ClassVar[str] = "export the model again with optimum-cli export openvino"

    @abstractmethod
    def published(self, architectures: Collection[str], names: Collection[str]) -> bool:
        """Whether a repository with these architectures and files holds such a model, complete or not."""

    def weights(self, source: Path) -> list[Path]:
        return [path for name in self.needed if (path := source / name).is_file()]

    def of_repository(
        self, repository: str, architectures: Collection[str], names: Collection[str]
    ) -> Collection[str] | None:
        if not self.published(architectures, names):
            return None
        if missing := [name for name in self.needed if name not in names]:
            raise SourceRejected(
                f"{repository} lacks {', '.join(missing)}, so it is not a whole model in OpenVINO form; {self.advice}"
            )
        return [name for name in names if Path(name).suffix in EXPORTED_SUFFIXES]

    def convert(self, job: ConversionJob, stage: Callable[[str], None]) -> Converted:
        known = self.open(Path(job.source), job.id)
        if known is None:
            raise ConversionFailed(f"{job.source} holds a model in another form than OpenVINO's; {self.advice}")
        return copy_export(job, known, stage)

    def open(self, directory: Path, name: str) -> InstalledModel | None:
        if not (directory / self.graph).is_file():
            return None
        if missing := [file for file in self.needed if not (directory / file).is_file()]:
            raise ConfigurationError(f"{directory}: {', '.join(missing)} is missing; {self.advice}")
        for file in self.needed:
            if file.endswith(".json"):
                read_config(directory / file)
        try:
            self.check(directory)
        except ConversionFailed as error:
            raise ConfigurationError(error.message) from error
        return describe_export(directory, name, self.kind, self.graph, self.limit)


def files_of_task(repository: str, architectures: Collection[str], names: Collection[str]) -> frozenset[str] | None:
    """As `ModelFiles.of_repository`, of the first task that recognises the repository."""
    for _, files in _files_of_tasks():
        if (wanted := files.of_repository(repository, architectures, names)) is not None:
            return frozenset(wanted)
    return None


def special_file(source: Path) -> str | None:
    """What is neither file nor directory in a source: reading a pipe would wait, and a device has no end."""
    for path in source.iterdir() if source.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            return f"{path} is a pipe, a socket or a device: a model's files must be plain files"
    return None


def recognised(source: Path) -> tuple[str, ModelFiles] | None:
    """The kind of model that a local source is, and who converts it; None if no task recognises it."""
    return next(((kind, files) for kind, files in _files_of_tasks() if files.recognises(source)), None)


def _files_of_tasks() -> list[tuple[str, ModelFiles]]:
    return [(task.kind, cast("ModelFiles", load(task.files))) for task in tasks().values() if task.files is not None]
