"""Hub files are taken from one commit and verified against what the hub declares for each."""

import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest

import worker_node.models.hub as hub_module
from worker_node.errors import DownloadFailed, HashMismatch
from worker_node.models.catalog import HubSource
from worker_node.models.hub import fetch_repository
from worker_node.models.progress import Silent

huggingface_hub = pytest.importorskip("huggingface_hub", reason="the extra 'hub' is not installed")

COMMIT = "a" * 40
FILES = {
    "openvino_model.bin": b"weights" * 1000,
    "config.json": b"{}",
    "README.md": b"not wanted",
    "sub/openvino_model.bin": b"not of the top directory",
}
LARGE = {"openvino_model.bin", "sub/openvino_model.bin"}


def blob(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as one repository needs; `declared` overrides what it says of a file's hash."""

    declared: ClassVar[dict[str, str]] = {}
    asked: ClassVar[list[str]] = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.asked.append(self.path)
        if self.path.startswith("/api/models/maker/model/revision/"):
            return self.answer(json.dumps({"id": "maker/model", "sha": COMMIT, "siblings": self.siblings()}).encode())
        name = self.path.partition(f"/maker/model/resolve/{COMMIT}/")[2]
        if name in FILES:
            return self.answer(FILES[name], ETag=f'"{hashlib.sha256(FILES[name]).hexdigest()}"')
        return self.answer(b"", status=404)

    def siblings(self):
        entries = []
        for name, content in FILES.items():
            entry = {"rfilename": name, "size": len(content), "blobId": self.declared.get(name, blob(content))}
            if name in LARGE:
                sha256 = self.declared.get(name, hashlib.sha256(content).hexdigest())
                entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 100}
            entries.append(entry)
        return entries

    def answer(self, content, status=200, **headers):
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine, and huggingface_hub pointed to it."""
    handler = type("ThisHub", (Hub,), {"declared": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    here = SimpleNamespace(
        HfApi=lambda: huggingface_hub.HfApi(endpoint=endpoint, token=False),
        hf_hub_download=lambda *args, **options: huggingface_hub.hf_hub_download(
            *args, endpoint=endpoint, token=False, **options
        ),
    )
    monkeypatch.setattr(hub_module, "_huggingface_hub", lambda: here)
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


SOURCE = HubSource(repo="maker/model", files=("*.bin", "config.json"))


class Recorder(Silent):
    """Progress that remembers."""

    def __init__(self):
        self.done = []

    def update(self, done):
        self.done.append(done)


def test_the_wanted_files_of_one_commit_come_verified(hub, tmp_path):
    progress = Recorder()
    hashes = fetch_repository(SOURCE, tmp_path, progress)
    assert hashes == {name: hashlib.sha256(FILES[name]).hexdigest() for name in ("openvino_model.bin", "config.json")}
    assert (tmp_path / "openvino_model.bin").read_bytes() == FILES["openvino_model.bin"]
    assert not (tmp_path / "README.md").exists()
    assert not (tmp_path / "sub").exists()
    assert all(COMMIT in path for path in hub.asked if "resolve" in path)
    assert max(progress.done) == len(FILES["openvino_model.bin"])


@pytest.mark.parametrize("name", ["openvino_model.bin", "config.json"])
def test_a_file_that_is_not_the_declared_one_is_refused(hub, tmp_path, name):
    hub.declared = {name: "0" * 64}
    with pytest.raises(HashMismatch, match=name):
        fetch_repository(SOURCE, tmp_path, Silent())


def test_a_repository_that_is_not_there_is_refused(hub, tmp_path):
    with pytest.raises(DownloadFailed, match="maker/none"):
        fetch_repository(HubSource(repo="maker/none", files=("*",)), tmp_path, Silent())


def test_a_repository_without_the_files_is_refused(hub, tmp_path):
    with pytest.raises(DownloadFailed, match="none of the files"):
        fetch_repository(HubSource(repo="maker/model", files=("*.gguf",)), tmp_path, Silent())


def test_without_the_extra_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadFailed, match=r"npu-node\[hub\]"):
        fetch_repository(SOURCE, tmp_path, Silent())
