"""Repositories of a hub, downloaded by huggingface_hub's own client from a hub that scripts what can go wrong."""

import hashlib
import sys

import pytest

from tests.support.scripted_hub import COMMIT, Repository
from worker_node.core.errors import DownloadFailed, HashMismatch, SourceRejected
from worker_node.core.types import Silent
from worker_node.models.catalog import SourceFormat
from worker_node.models.prepare import fetch_hub
from worker_node.models.sources.reference import HubReference

WEIGHTS = bytes(range(256)) * 2048
OPENVINO = {
    "openvino_model.xml": b"<net/>",
    "openvino_model.bin": WEIGHTS,
    "openvino_tokenizer.xml": b"<t/>",
    "openvino_tokenizer.bin": b"t",
    "openvino_detokenizer.xml": b"<d/>",
    "openvino_detokenizer.bin": b"d",
    "config.json": b"{}",
    "README.md": b"not wanted",
    "pytorch_model.bin": b"not wanted",
    "onnx/model.onnx": b"not wanted",
}
REFERENCE = HubReference("maker/model")


class Recorder(Silent):
    """Progress that remembers."""

    def __init__(self):
        self.stages, self.done = [], []

    def stage(self, name, total=None):
        self.stages.append(name)

    def update(self, done):
        self.done.append(done)


@pytest.fixture
def repository(hub):
    hub.repositories["maker/model"] = repository = Repository(dict(OPENVINO), card={"license": "mit"})
    return repository


def test_an_openvino_directory_arrives_verified_and_without_anything_else(hub, repository, tmp_path):
    progress = Recorder()
    arrived = fetch_hub(REFERENCE, tmp_path / "d", progress)
    wanted = {name for name in OPENVINO if name.startswith(("openvino_", "config"))}
    assert arrived.format is SourceFormat.OPENVINO
    assert arrived.hashes == {name: hashlib.sha256(OPENVINO[name]).hexdigest() for name in wanted}
    assert (tmp_path / "d/openvino_model.bin").read_bytes() == WEIGHTS
    assert not (tmp_path / "d/README.md").exists()
    assert (arrived.licence, arrived.origin) == ("mit", f"hub maker/model@{COMMIT}")
    assert all(f"/resolve/{COMMIT}/" in path for _, path, _ in hub.asked if "/resolve/" in path)
    assert max(progress.done) == len(WEIGHTS)
    assert "downloading openvino_model.bin" in progress.stages


def test_a_pull_that_failed_is_continued_by_the_next_one(hub, repository, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.cuts["openvino_model.bin"] = [200_000, *[0] * 20]
    with pytest.raises(DownloadFailed, match="pull again to continue"):
        fetch_hub(REFERENCE, tmp_path / "d", Silent())
    hub.cuts.clear()
    hub.asked.clear()
    fetch_hub(REFERENCE, tmp_path / "d", Silent())
    assert (tmp_path / "d/openvino_model.bin").read_bytes() == WEIGHTS
    (first,) = [span for name, span in hub.large_downloads() if name == "openvino_model.bin"]
    assert first is not None
    assert int(first.removeprefix("bytes=").rstrip("-")) > 0


@pytest.mark.parametrize("name", ["openvino_model.bin", "config.json"])
def test_a_file_that_is_not_the_declared_one_is_rejected_and_removed(hub, repository, tmp_path, name):
    repository.declared = {name: "0" * 64}
    with pytest.raises(HashMismatch, match=name):
        fetch_hub(REFERENCE, tmp_path / "d", Silent())
    assert not (tmp_path / "d" / name).exists()


@pytest.mark.parametrize(
    ("token", "words"),
    [(None, ["gated", "401", "licence", "HF_TOKEN"]), ("hf_right", ["gated", "403", "accept the licence"])],
)
def test_a_gated_repository_says_what_to_accept_and_what_to_set(hub, repository, tmp_path, monkeypatch, token, words):
    repository.gated = True
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(DownloadFailed) as caught:
        fetch_hub(REFERENCE, tmp_path / "d", Silent())
    assert all(word in caught.value.message for word in [*words, f"{hub.endpoint}/maker/model"])
    assert "hf_right" not in caught.value.message


def test_a_gated_repository_opens_for_the_token_of_a_member(hub, repository, tmp_path, monkeypatch):
    repository.gated = True
    hub.members.add("hf_member")
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    assert fetch_hub(REFERENCE, tmp_path / "d", Silent()).format is SourceFormat.OPENVINO


def test_a_wrong_token_is_named_as_the_reason(hub, repository, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(DownloadFailed, match=r"rejects the token .*401") as caught:
        fetch_hub(REFERENCE, tmp_path / "d", Silent())
    assert "hf_wrong" not in caught.value.message


@pytest.mark.parametrize("private", [True, False])
def test_a_repository_that_is_private_or_missing_says_that_it_may_be_either(hub, repository, tmp_path, private):
    repository.private = private
    reference = REFERENCE if private else HubReference("maker/none")
    with pytest.raises(DownloadFailed, match=r"no such repository .*HF_TOKEN"):
        fetch_hub(reference, tmp_path / "d", Silent())


def test_an_unknown_revision_is_named(hub, repository, tmp_path):
    with pytest.raises(DownloadFailed, match="no revision 'v9'"):
        fetch_hub(HubReference("maker/model", "v9"), tmp_path / "d", Silent())


def test_a_hub_that_cannot_be_reached_says_what_to_check(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match=r"no connection to http://127.0.0.1:9 .*HF_ENDPOINT"):
        fetch_hub(REFERENCE, tmp_path / "d", Silent())


def test_a_gguf_architecture_that_cannot_be_converted_is_rejected_before_the_download(hub, tmp_path):
    hub.repositories["maker/g"] = Repository({"m.Q4_K_M.gguf": WEIGHTS}, gguf={"architecture": "mamba"})
    with pytest.raises(SourceRejected, match="mamba"):
        fetch_hub(HubReference("maker/g"), tmp_path / "d", Silent())
    assert hub.large_downloads() == []


def test_a_disk_that_fills_up_meanwhile_is_told_as_such(hub, repository, tmp_path, monkeypatch):
    def full(*_args, **_options):
        raise OSError(28, "No space left on device", "x.part")

    monkeypatch.setattr("worker_node.models.sources.downloads._receive", full)
    with pytest.raises(DownloadFailed, match=r"the disk is full .*NPU_NODE_MODEL_STORE"):
        fetch_hub(REFERENCE, tmp_path / "d", Silent())


def test_without_the_extra_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadFailed, match=r"npu-node\[hub\]"):
        fetch_hub(REFERENCE, tmp_path, Silent())
