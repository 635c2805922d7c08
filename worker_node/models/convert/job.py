"""What a conversion is asked for and reports, and what a task contributes that brings models of its own.

Conversions and pulls work in processes of their own and report in lines of JSON (`report`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec

from worker_node.models.catalog import Quantization, SourceFormat
from worker_node.models.directory import Fidelity, GenerationCanary, InstalledModel, VectorFidelity
from worker_node.registry import load, tasks


class ConversionJob(msgspec.Struct, frozen=True, kw_only=True):
    """Make a model directory in `target` from the files in `source`; both exist, `target` is empty.

    What is None is read from the files themselves. `origin` and `source_sha256` go into the manifest as they are.
    `pooling` (a `pooling.Pooling`) and `normalize` count for encoders whose files do not specify them.
    `prompts` and `matryoshka` are those of the catalog, for encoders whose files declare none.
    `movable` files may be moved out of `source` instead of copied.
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
    family: str | None = None
    quantization: Quantization | None = None
    context_limit: int | None = None
    canary: GenerationCanary | None = None
    max_prompt_len: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    aliases: tuple[str, ...] = ()
    prompts: dict[str, str] = {}
    matryoshka: tuple[int, ...] = ()


class ConversionStage(msgspec.Struct, frozen=True, tag=True):
    """A stage of the conversion began."""

    name: str


class ConversionGivenUp(msgspec.Struct, frozen=True, tag=True):
    """The conversion was given up; `message` says why in words for the user."""

    message: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The target directory is complete, its manifest included."""


Message = ConversionStage | ConversionGivenUp | Done


# What a conversion found out about the model that it made.


@dataclass(frozen=True, slots=True)
class Converted:
    """The part of the manifest that only the files themselves can tell."""

    kind: str
    family: str
    quantization: str
    context_limit: int
    dimensions: int | None = None
    space: str | None = None
    fidelity: Fidelity | None = None
    canary: GenerationCanary | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    matryoshka: tuple[int, ...] = ()
    vector_fidelity: VectorFidelity | None = None


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
        """The files to fetch of a repository of that name, architectures and files at its top, small ones aside.

        None for a repository that holds no such model. Raises SourceRejected for one that holds one and lacks files.
        """
        return None

    def check(self, _directory: Path) -> None:  # noqa: B027
        """Raise ConversionFailed for what the small files of a directory show that cannot be converted."""

    @abstractmethod
    def convert(self, job: ConversionJob, stage: Callable[[str], None]) -> Converted:
        """Make the model's directory `job.target` of `job.source`, a directory. Runs in a process of its own.

        Raises ConversionFailed, naming the file and the option, for what cannot be converted.
        """

    def open(self, _directory: Path, _name: str) -> InstalledModel | None:
        """The model of a directory that can be served as it is; None where it must be converted first.

        Raises ConfigurationError, naming the file, when it is damaged.
        """
        return None


def files_of_task(repository: str, architectures: Collection[str], names: Collection[str]) -> frozenset[str] | None:
    """What to fetch of a repository that a task recognises; None for what the node itself must know.

    Raises SourceRejected as `ModelFiles.of_repository`.
    """
    for _, files in _all():
        if (wanted := files.of_repository(repository, architectures, names)) is not None:
            return frozenset(wanted)
    return None


def special_file(source: Path) -> Path | None:
    """What of a directory is neither a file nor a directory: a pipe would be waited for, a device read for ever."""
    if not source.is_dir():
        return None
    return next(
        (path for path in sorted(source.iterdir()) if path.exists() and not (path.is_file() or path.is_dir())), None
    )


def recognised(source: Path) -> tuple[str, ModelFiles] | None:
    """The kind of model that a local source is, and who converts it; None for what the node itself must know."""
    return next(((kind, files) for kind, files in _all() if files.recognises(source)), None)


def _all() -> Iterator[tuple[str, ModelFiles]]:
    for task in tasks().values():
        if task.files is not None:
            yield task.kind, cast("ModelFiles", load(task.files))
