"""The input of a job: its files, how they are opened, and the fragments that they are cut into.

Fragments are the units of work. The same files make the same ones on every machine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from backend_client.bulk.stores import file_system, need
from backend_client.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class InputFile:
    """`version`: etag or modification time; `form`: parquet, jsonl or txt; `compression`: gzip, zstd or ""."""

    url: str
    size: int
    version: str
    form: str
    compression: str = ""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Rows `start` to `stop` (exclusive) of Parquet; of JSONL or text, the lines that begin in these bytes.

    A compressed file is one fragment. `rows` counts lines that are rejected later, too. `problem` says why a file
    cannot be read at all; its fragment becomes one record among the rejected.
    """

    file: InputFile
    start: int
    stop: int
    rows: int
    problem: str = ""
    id: str = field(init=False, compare=False)
    """Names the fragment and its output: 32 hex digits of path, size, version and range."""

    def __post_init__(self) -> None:
        key = json.dumps([self.file.url, self.file.size, self.file.version, self.start, self.stop])
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:32]
        object.__setattr__(self, "id", digest)

    @property
    def name(self) -> str:
        return f"part-{self.id}.parquet"


def cut_parquet(file: InputFile, row_groups: Sequence[int], wanted: int) -> Iterator[Fragment]:
    """Small row groups together, a large one in equal parts, of about `wanted` rows."""
    start = stop = 0
    for rows in row_groups:
        if stop > start and stop - start + rows > wanted:
            yield Fragment(file, start, stop, stop - start)
            start = stop
        stop += rows
        if stop - start > wanted:
            parts = -(-(stop - start) // wanted)
            bounds = [start + (stop - start) * part // parts for part in range(parts + 1)]
            yield from (Fragment(file, *bound, bound[1] - bound[0]) for bound in itertools.pairwise(bounds))
            start = stop
    if stop > start or not stop:
        yield Fragment(file, start, stop, stop - start)


# Which files an input names.

_FORMS = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "txt", ".csv": "csv"}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_VERSIONS = ("ETag", "etag", "generation", "md5", "mtime", "LastModified", "last_modified", "modified", "created")


def list_inputs(pattern: str) -> list[InputFile]:
    """The files of a pattern, a directory with all below it, or one file, ordered by path, without hidden ones.

    Raises ConfigurationError when there are none, or one is of no known form.
    """
    system, path = file_system(pattern)
    try:
        if _is_glob(system, path):
            found = [_target(system, info) for info in system.glob(path, detail=True).values()]
        elif system.isdir(path):
            found = list(_below(system, path, [os.path.realpath(path)]))
        else:
            found = [system.info(path)] if system.exists(path) else []
    except OSError as error:
        problem = f"{pattern} cannot be listed: {error}"
    else:
        names = {system.unstrip_protocol(info["name"]): info for info in found if info.get("type") == "file"}
        files = [
            _input(name, info)
            for name, info in sorted(names.items())
            if not name.rpartition("/")[2].startswith((".", "_"))
        ]
        if files:
            return files
        problem = f"no input file matches {pattern}"
    raise ConfigurationError(problem)


def check_apart(pattern: str, out: str) -> None:
    """Raise ConfigurationError for an output that the input would list."""
    system, path = file_system(pattern)
    other, place = file_system(out)
    if other.protocol != system.protocol:
        return
    if "file" in system.protocol:
        # One directory has many spellings: `in/../in`, and every link to it.
        path, place = os.path.realpath(path), os.path.realpath(place)
    written = [f"{place.rstrip('/')}/{name}" for name in ("part-0.parquet", "_rejected/0.jsonl")]
    if _is_glob(system, path):
        matches = re.compile(need("fsspec.utils").glob_translate(path)).match
        listed = any(matches(name) for name in written)
    else:
        listed = any(name.startswith(f"{path.rstrip('/')}/") and not _is_hidden_below(name, path) for name in written)
    if listed:
        raise ConfigurationError(f"{out} is among the input {pattern}: choose an output outside of it")


def _is_glob(system: Any, path: str) -> bool:
    """Whether the path is a pattern: one that exists as it is written is that path."""
    if not any(sign in path for sign in "*?["):
        return False
    try:
        return not system.exists(path)
    except Exception:  # noqa: BLE001  (a store may refuse the name itself: fsspec's backends have exceptions of their own)
        return True


def _below(system: Any, path: str, walked: list[str]) -> Iterator[dict[str, Any]]:
    """The files of known forms below a directory, also behind links, not in hidden directories."""
    for info in system.find(path, detail=True).values():
        if _is_hidden_below(info["name"], path):
            continue
        if info.get("islink") and system.isdir(info["name"]):
            real = os.path.realpath(info["name"])
            # What leads back into what is walked, or around it, would be there twice.
            if not any(f"{real}/".startswith(f"{known}/") or f"{known}/".startswith(f"{real}/") for known in walked):
                walked.append(real)
                yield from _below(system, info["name"], walked)
        # A text file in a directory is more often a note on the data than a part of it.
        elif _suffixes(info["name"])[0] not in {None, "txt"}:
            yield _target(system, info)


def _target(system: Any, info: dict[str, Any]) -> dict[str, Any]:
    """What a link leads to, under the link's name. Raises ConfigurationError for one to nothing."""
    if not info.get("islink"):
        return info
    if not system.exists(info["name"]):
        raise ConfigurationError(f"{info['name']} is a link to a file that is not there")
    return {**system.info(info["name"]), "name": info["name"]}


def _is_hidden_below(name: str, path: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.removeprefix(path).split("/"))


def _input(name: str, info: dict[str, Any]) -> InputFile:
    form, compression = _suffixes(name)
    if form is None:
        endings = ", ".join([*(end for end in _FORMS if end != ".csv"), *(f".jsonl{end}" for end in _COMPRESSIONS)])
        raise ConfigurationError(f"{name} is of no known form: inputs end with {endings}")
    if form == "csv":
        # Known so that a directory with one is refused, and its rows are not left out in silence.
        raise ConfigurationError(
            f"{name} is CSV, which is not read: convert it to Parquet (docs/cluster.md has a line for it)"
        )
    return InputFile(name, info["size"], _version(name, info), form, compression)


def _version(url: str, info: dict[str, Any]) -> str:
    if url.startswith("file://"):
        # fsspec's is a float, which is not exact.
        return str(os.stat(url.removeprefix("file://")).st_mtime_ns)  # noqa: PTH116  (a Path would normalise it)
    return next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")


def _suffixes(name: str) -> tuple[str | None, str]:
    """The form and the compression that a name tells."""
    path = Path(name)
    compression = _COMPRESSIONS.get(path.suffix.lower(), "")
    if compression:
        path = path.with_suffix("")
    form = _FORMS.get(path.suffix.lower())
    return (None, "") if form == "parquet" and compression else (form, compression)


# Opening files, which keeps apart a store that fails from content that is damaged.


class InputChanged(OSError):
    """The file is no longer the one that the job was planned from."""


class InputDamaged(Exception):
    """The content of the file cannot be read."""


class InputSource:
    """A file opened for reading. `failure` is the error of its store, where that ended a reader.

    Decoders report a read that failed and damaged content alike. The block raises the failure, else InputDamaged.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.failure: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._file.close()
        if isinstance(error, (need("pyarrow").ArrowException, OSError, ValueError)):
            raise self.failure or InputDamaged(str(error).partition("\n")[0][:200]) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:
        try:
            data: bytes = self._file.read(size)
        except OSError as error:
            self.failure = error
            raise
        except Exception as error:
            # fsspec's backends have exceptions of their own for what happens on the network.
            self.failure = OSError(f"{type(error).__name__}: {error}")
            raise self.failure from error
        return data


def check_unchanged(file: InputFile) -> None:
    """Raise InputChanged unless the file is the planned one."""
    system, path = file_system(file.url)
    try:
        info = system.info(path)
        same = (info["size"], _version(file.url, info)) == (file.size, file.version)
    except FileNotFoundError:
        same = False
    if not same:
        raise InputChanged(f"{file.url} has changed since the job began: restore it, or begin another job")


def opened(file: InputFile) -> InputSource:
    """Open the file, which must be the planned one. Raises InputChanged, OSError."""
    check_unchanged(file)
    system, path = file_system(file.url)
    return InputSource(system.open(path, "rb"))
