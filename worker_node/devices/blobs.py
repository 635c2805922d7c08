"""What `npu-node compile` makes: blobs compiled ahead of time, and the record of what they were compiled from.

A directory holds one blob for each compiled shape, and `blobs.json`. A blob fits one model, one kind of device, one
driver and compiler, one OpenVINO and the settings that it was compiled with. The engine that loads it compares all of
them first, then the hash of each file, so that the native code that reads blobs is given only what was written here.
That protects against mistakes and damage, not against whoever can write to the directory: a blob is code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

RECORD_FILE = "blobs.json"
VERSION = 1
# A record is some hundred bytes; a larger file is not one.
_RECORD_LIMIT = 1 << 20
# What a blob depends on, as it is called in messages, in the order in which a difference is worth mentioning.
_FACTS = {
    "model_sha256": "the model's files",
    "device": "the device",
    "architecture": "the device's architecture",
    "driver": "the NPU driver",
    "compiler": "the NPU compiler",
    "openvino": "OpenVINO",
    "genai": "OpenVINO GenAI",
}


class BlobRejected(Exception):
    """A blob cannot be used here; the message names its directory and the reason."""


class BlobOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """All that a blob depends on. `settings` are the engine's options that are compiled in; a version may be unknown.

    `model` is for people: two models are equal if `model_sha256`, over graph and weights, is.
    """

    model: str
    model_sha256: str
    device: str
    architecture: str | None
    driver: str | None
    compiler: str | None
    openvino: str
    genai: str | None
    settings: dict[str, Any]


class BlobFile(msgspec.Struct, frozen=True):
    """`size` in bytes, `sha256` in hex."""

    size: int
    sha256: str


class BlobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `blobs.json`."""

    version: int
    origin: BlobOrigin
    files: dict[str, BlobFile]


def write_record(directory: Path, origin: BlobOrigin, names: Iterable[str]) -> None:
    """Describe the blobs `names` that were written to `directory`. Raises OSError."""
    files = {name: BlobFile((directory / name).stat().st_size, sha256(directory / name)) for name in names}
    record = msgspec.json.encode(BlobRecord(version=VERSION, origin=origin, files=files))
    (directory / RECORD_FILE).write_bytes(msgspec.json.format(record, indent=2) + b"\n")


def read_record(directory: Path) -> BlobRecord:
    """Read `blobs.json`. Raises BlobRejected."""
    path = directory / RECORD_FILE
    try:
        if not path.is_file():
            raise BlobRejected(f"{directory} has no {RECORD_FILE}; make it with: npu-node compile")
        with path.open("rb") as file:
            record = msgspec.json.decode(file.read(_RECORD_LIMIT), type=BlobRecord)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise BlobRejected(f"{path} cannot be read ({error}); compile again") from None
    if record.version != VERSION:
        raise BlobRejected(f"{path} has version {record.version}, known is {VERSION}; compile again")
    return record


def check_blobs(directory: Path, here: BlobOrigin, names: Iterable[str]) -> None:
    """Raise BlobRejected unless the blobs `names` of a directory were compiled for what is `here` and are unchanged."""
    record = read_record(directory)
    if differences := list(_differences(record.origin, here)):
        raise BlobRejected(f"the blobs in {directory} were compiled for something else: {'; '.join(differences)}")
    for name in names:
        path, known = directory / name, record.files.get(name)
        if known is None or not path.is_file():
            raise BlobRejected(f"{path} is missing; compile again")
        if (size := path.stat().st_size) != known.size:
            raise BlobRejected(f"{path} is damaged: {size} bytes where {known.size} were written; compile again")
        if sha256(path) != known.sha256:
            raise BlobRejected(f"{path} is damaged: its hash is another than when it was written; compile again")


def _differences(made: BlobOrigin, here: BlobOrigin) -> Iterable[str]:
    for name, text in _FACTS.items():
        then, now = getattr(made, name), getattr(here, name)
        if then != now:
            if name == "model_sha256":
                yield f"{text} differ ({made.model} then)"
            else:
                yield f"{text} was {_shown(then)}, and is {_shown(now)} here"
    # Those of another model say nothing.
    if made.model_sha256 == here.model_sha256:
        yield from _settings(made.settings, here.settings)


def _settings(made: Mapping[str, Any], here: Mapping[str, Any]) -> Iterable[str]:
    for name in sorted(made.keys() | here.keys()):
        then, now = made.get(name), here.get(name)
        if then != now:
            yield f"{name} was {_shown(then)}, and is {_shown(now)} here"


def _shown(value: Any) -> str:
    return "not set or unknown" if value is None else str(value)[:100]


def sha256(*paths: Path) -> str:
    """The hash of files one after another, in hex. Raises OSError."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
