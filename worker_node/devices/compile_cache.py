"""Where compiled models are kept, and which of them can never be used again.

A blob fits one model, one device and the versions that made it: after an upgrade of OpenVINO, the driver or the
compiler it is refused by the device at best. So each combination has a directory of its own,
`<root>/<model>/<device>-<digest>/`, with the key in `key.json`; entries of the same model directory that differ from
the current key in a version or in the model's hash are removed at start-up. Entries that differ only in lengths, and
those of another model directory of this name (in another store), stay: another node on this machine may use them.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

KEY_FILE = "key.json"


class CacheKey(msgspec.Struct, frozen=True, kw_only=True):
    """All that a compiled blob depends on. `lengths` are the static shapes, in tokens; a version may be unknown."""

    model: str
    model_hash: str
    device: str
    openvino: str
    driver: str | None = None
    compiler: str | None = None
    lengths: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """16 hex digits that differ when any part does."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def outdates(self, other: CacheKey) -> bool:
        """Whether `other`, of the same model and device, cannot be used any more."""
        return (self.model, self.device) == (other.model, other.device) and (
            self.model_hash,
            self.openvino,
            self.driver,
            self.compiler,
        ) != (other.model_hash, other.openvino, other.driver, other.compiler)


class _Entry(CacheKey, frozen=True, kw_only=True):
    """What `key.json` says: the key, and the model directory it was made from (the last one, where copies share it)."""

    source: str | None = None

    def serves_another(self, source: Path) -> bool:
        """Whether it was made from another model directory, which still exists."""
        return self.source is not None and self.source != str(source) and Path(self.source).is_dir()


def model_hash(directory: Path, names: Iterable[str], stamped: Iterable[str] = ()) -> str:
    """SHA-256 over the files of those names that the model directory has.

    Of the `stamped` ones, which take too long to read, the size and the time of the last change stand for the content.
    """
    digest = hashlib.sha256()
    for name in names:
        path = directory / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    for name in stamped:
        path = directory / name
        if path.is_file():
            found = path.stat()
            digest.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def cache_directory(root: Path, key: CacheKey) -> Path:
    """The directory for this key's blobs."""
    return root / key.model / f"{key.device}-{key.digest}"


def prepare(root: Path, key: CacheKey, source: Path) -> Path:
    """Make the directory for this key of the model in `source`, and remove what it outdates. Raises OSError."""
    directory = cache_directory(root, key)
    directory.mkdir(parents=True, exist_ok=True)
    entry = _Entry(**msgspec.structs.asdict(key), source=str(source))
    (directory / KEY_FILE).write_bytes(msgspec.json.encode(entry))
    for sibling in directory.parent.iterdir():
        other = _read_entry(sibling)
        if other is not None and key.outdates(other) and not other.serves_another(source):
            log.info("compile cache: removing %s, made for other versions", sibling)
            shutil.rmtree(sibling, ignore_errors=True)
    return directory


def _read_entry(directory: Path) -> _Entry | None:
    """What an entry says of itself; None for what is not ours and must not be touched."""
    try:
        return msgspec.json.decode((directory / KEY_FILE).read_bytes(), type=_Entry)
    except (OSError, msgspec.DecodeError):
        return None
