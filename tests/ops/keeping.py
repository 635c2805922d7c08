"""What is made once and kept: images, wheels, keys. A name contains the hash of what its content is made of."""

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu-node" / "ops"


def kept(name, make, recipe=""):
    """The file or directory of this name and recipe below the cache; `make(part)` makes it where it is missing.

    It appears complete or not at all, and processes that want the same one wait for the one that makes it.
    """
    stem, dot, suffix = name.partition(".")
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    path = CACHE / f"{stem}-{digest}{dot}{suffix}"
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = CACHE / f"part-{path.name}"
            remove(part)
            make(part)
            part.rename(path)
    return path


def remove(path):
    """Remove a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
