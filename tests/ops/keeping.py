"""What is made once and kept: images, wheels, keys. A name contains the hash of what its content is made of."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

# For what is downloaded: a mirror or an index may be busy for a while.
ATTEMPTS = 3
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu-node" / "ops"


def kept(name, make, recipe="", attempts=1):
    """The file or directory of this name and recipe below the cache; `make(part)` makes it where it is missing.

    It appears complete or not at all, and processes that want the same one wait for the one that makes it. With more
    `attempts`, one that fails is followed by another, from the beginning.
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
            for left in reversed(range(attempts)):
                remove(part)
                try:
                    make(part)
                except (AssertionError, subprocess.SubprocessError):
                    if not left:
                        raise
                else:
                    break
            part.rename(path)
    return path


def remove(path):
    """Remove a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
