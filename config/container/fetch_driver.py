"""Unpack the driver's .deb packages from a verified archive: fetch_driver.py URL SHA256 TARGET.

An empty URL makes an empty TARGET. Ends with a message when the hash is missing or another.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path


def main(url: str, sha256: str, target: Path) -> None:
    """Fill `target` with the files of the packages."""
    target.mkdir(parents=True)
    if not url:
        return
    with urllib.request.urlopen(url) as response:  # noqa: S310  (whoever builds the image gives it)
        data = response.read()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256.lower():
        sys.exit(f"{url} has sha256 {found}, NPU_DRIVER_SHA256 is {sha256 or 'not given'}: the driver is not used")
    with tempfile.TemporaryDirectory() as room:
        archive = Path(room, "driver.tar.gz")
        archive.write_bytes(data)
        with tarfile.open(archive) as packed:
            packed.extractall(room, filter="data")
        packages = sorted(Path(room).rglob("*.deb"))
        if not packages:
            sys.exit(f"{url} holds no .deb package")
        for package in packages:
            subprocess.run(["dpkg-deb", "--extract", package, target], check=True)  # noqa: S603, S607


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
