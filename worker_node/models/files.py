"""Published files that only one task knows: which they are, and what is made of them.

A task names an object of `ModelFiles` in its registration (`registry.Task.files`). Its files are asked for before those
that the node itself knows (GGUF, OpenVINO directories of generation models and encoders, safetensors of encoders)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import cast

from worker_node.models.convert.job import ConversionJob, Converted
from worker_node.models.manifest import InstalledModel
from worker_node.registry import load, tasks


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
