"""Where compiled models are kept, and which of them can never be used again.

A blob fits one model, one device and the versions that made it: after an upgrade of OpenVINO, the driver or the
compiler it is refused by the device at best. So each combination has a directory of its own,
`<root>/<model>/<device>-<digest>/`, with the key in `key.json`; a model's entries of other versions are removed at
start-up. Those of other lengths or another model's files stay: another node or store on this machine may use them.
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
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def outdates(self, other: CacheKey) -> bool:
        """Whether `other` was compiled by other versions for the same device, and can never be used again."""
        return self.device == other.device and (self.openvino, self.driver, self.compiler) != (
            other.openvino,
            other.driver,
            other.compiler,
        )


def model_hash(directory: Path, names: Iterable[str], stamped: Iterable[str] = ()) -> str:
    """SHA-256 over the named files; size and time stand for the `stamped` ones, which take too long to read."""
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


def prepare(root: Path, key: CacheKey) -> Path:
    """Make the directory for this key, and remove what it outdates. Raises OSError."""
    directory = root / key.model / f"{key.device}-{key.digest}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / KEY_FILE).write_bytes(msgspec.json.encode(key))
    for sibling in directory.parent.iterdir():
        try:
            other = msgspec.json.decode((sibling / KEY_FILE).read_bytes(), type=CacheKey)
        except (OSError, msgspec.DecodeError):
            continue  # not ours: it must not be touched
        if key.outdates(other):
            log.info("compile cache: removing %s, made for other versions", sibling)
            shutil.rmtree(sibling, ignore_errors=True)
    return directory
