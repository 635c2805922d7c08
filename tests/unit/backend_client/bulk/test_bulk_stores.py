"""Stores: the first writer of a name wins, and a store that cannot promise it is refused."""

import os
from types import SimpleNamespace

import fsspec
import pytest

from backend_client.bulk import stores
from backend_client.bulk.stores import open_store, prove_exclusive
from backend_client.errors import ConfigurationError


@pytest.fixture(params=["local", "object"])
def store(request, tmp_path):
    if request.param == "local":
        return open_store(str(tmp_path / "out"))
    return open_store(f"memory://{tmp_path.name}/out")


def test_the_first_writer_of_a_name_wins(store):
    for number in range(3):
        path = store.temporary("f")
        path.write_bytes(str(number).encode())
        assert store.commit(path, "part-f.parquet") == (number == 0)
        assert not path.exists()
    assert store.read("part-f.parquet") == b"0"


def test_small_files_are_created_once_counted_read_and_removed(store):
    assert store.create("_job.json", b"1")
    assert not store.create("_job.json", b"2")
    assert store.read("_job.json") == b"1"
    store.count("_begun/a")
    store.count("_begun/a")
    assert store.names("_begun") == {"a"}
    assert store.read("missing") is None
    assert store.names("missing") == set()
    store.remove(["_job.json", "missing"])
    assert "_job.json" not in store.names()
    with store.open("_begun/a") as file:
        assert len(file.read()) == 2


def test_only_what_cannot_be_made_again_waits_for_the_disk(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    synced = []
    monkeypatch.setattr("os.fsync", synced.append)
    store.count("_begun/a")
    assert len(synced) == 0
    store.create("_job.json", b"1")
    assert len(synced) == 2, "the file and its directory"
    monkeypatch.setattr(stores, "os", SimpleNamespace(**{**vars(os), "name": "nt"}))
    store.create("other.json", b"1")
    assert len(synced) == 3, "Windows cannot open a directory"


def test_a_store_that_replaces_is_refused(monkeypatch):
    system = fsspec.filesystem("memory")
    monkeypatch.setattr(type(system), "pipe_file", lambda self, path, value, mode="overwrite", **_: None)
    with pytest.raises(ConfigurationError, match="cannot refuse a second writer"):
        prove_exclusive(open_store("memory://replaces"), "memory://replaces")


def test_temporary_files_are_swept_when_the_job_is_complete(tmp_path):
    store = open_store(str(tmp_path))
    store.temporary("a").touch()
    assert store.names() == set()
    store.sweep()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_whose_temporary_file_was_swept_lost_only_if_there_is_a_winner(tmp_path):
    store = open_store(str(tmp_path))
    path = store.temporary("a")
    with pytest.raises(FileNotFoundError):
        store.commit(path, "part-a.parquet")
    (tmp_path / "part-a.parquet").touch()
    assert store.commit(path, "part-a.parquet") is False


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(stores.importlib, "import_module", _absent)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[bulk\]'"):
        stores.open_store("out")


def _absent(name):
    raise ModuleNotFoundError(f"No module named {name}", name=name)
