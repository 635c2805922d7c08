"""Repositories of a hub, downloaded by huggingface_hub's own client from a hub that scripts what can go wrong."""

import hashlib
from unittest.mock import Mock

import httpx2
import pytest

from tests.support.scripted_hub import COMMIT, Repository
from worker_node.core.errors import DownloadFailed, HashMismatch, HubUnreachable
from worker_node.models import disk
from worker_node.models.catalog import HubReference, SourceFormat
from worker_node.models.downloads import fetch_head, list_repository
from worker_node.models.progress import Progress
from worker_node.models.pull import fetch_hub
from worker_node.models.sources import Listing, RemoteFile

WEIGHTS = bytes(range(256)) * 2048
GRAPHS = {f"openvino_{part}.xml": b"<net/>" for part in ("model", "tokenizer", "detokenizer")}
WANTED = GRAPHS | {name.replace(".xml", ".bin"): b"w" for name in GRAPHS} | {"openvino_model.bin": WEIGHTS}
WANTED |= {"config.json": b"{}", "chat_template.jinja": b"template"}
OTHERS = ("README.md", "pytorch_model.bin", "onnx/model.onnx", "sub/openvino_model.bin", "model.safetensors")
REFERENCE = HubReference("maker/model")


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


@pytest.fixture
def repository(hub):
    hub.repositories["maker/model"] = repository = Repository(
        WANTED | dict.fromkeys(OTHERS, b"not wanted"), card={"license": "mit"}
    )
    return repository


def test_an_openvino_directory_arrives_verified_and_without_anything_else(hub, repository, tmp_path):
    progress = Mock()
    arrived = fetch_hub(REFERENCE, tmp_path / "d", progress)
    assert arrived.format is SourceFormat.OPENVINO
    assert arrived.hashes == {name: hashlib.sha256(content).hexdigest() for name, content in WANTED.items()}
    assert (tmp_path / "d/openvino_model.bin").read_bytes() == WEIGHTS
    assert not (tmp_path / "d/README.md").exists()
    assert (arrived.licence, arrived.origin) == ("mit", f"hub maker/model@{COMMIT}")
    assert all(f"/resolve/{COMMIT}/" in path for _, path, _ in hub.asked if "/resolve/" in path)
    assert max(call.args[0] for call in progress.update.call_args_list) == len(WEIGHTS)
    assert "downloading openvino_model.bin" in [call.args[0] for call in progress.stage.call_args_list]


def spans(hub):
    return [span for name, span in hub.large_downloads() if name == "openvino_model.bin"]


def test_a_cut_connection_is_continued_where_it_broke(hub, repository, tmp_path):
    hub.cuts["openvino_model.bin"] = [300_000, 100_000, 100_000]
    fetch_hub(REFERENCE, tmp_path / "d", Progress())
    assert (tmp_path / "d/openvino_model.bin").read_bytes() == WEIGHTS
    assert spans(hub) == [f"bytes={start}-{len(WEIGHTS) - 1}" for start in (0, 300_000, 400_000, 500_000)]


def test_a_pull_that_failed_is_continued_by_the_next_one(hub, repository, tmp_path, waits):
    hub.cuts["openvino_model.bin"] = [300_000, *[0] * 20]
    with pytest.raises(DownloadFailed, match=r"0\.3 MB arrived and are kept: pull again to continue"):
        fetch_hub(REFERENCE, tmp_path / "d", Progress())
    assert waits == [1.0] * 5, "five retries since the last byte"
    hub.cuts.clear()
    hub.asked.clear()
    fetch_hub(REFERENCE, tmp_path / "d", Progress())
    assert (tmp_path / "d/openvino_model.bin").read_bytes() == WEIGHTS
    assert spans(hub) == [f"bytes=300000-{len(WEIGHTS) - 1}"]


def test_a_server_without_ranges_sends_it_all_again_and_no_more_than_was_asked_for_is_kept(hub, repository, tmp_path):
    hub.ignore_ranges = True
    hub.cuts["openvino_model.bin"] = [300_000]
    fetch_hub(REFERENCE, tmp_path / "d", Progress())
    assert (tmp_path / "d/openvino_model.bin").read_bytes() == WEIGHTS
    listing = list_repository(REFERENCE)
    (weights,) = [file for file in listing.files if file.path == "openvino_model.bin"]
    assert fetch_head(REFERENCE, listing, weights, tmp_path, 1000).read_bytes() == WEIGHTS[:1000]


def test_only_a_busy_server_is_asked_again(hub, repository, tmp_path):
    hub.statuses["openvino_model.bin"] = [503, 429]
    fetch_hub(REFERENCE, tmp_path / "d", Progress())
    hub.statuses["openvino_model.bin"] = [418]
    hub.asked.clear()
    with pytest.raises(DownloadFailed, match="418"):
        fetch_hub(REFERENCE, tmp_path / "other", Progress())
    assert len(spans(hub)) == 1


def test_a_disk_that_is_too_small_is_said_before_the_file_comes(hub, repository, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free_space", lambda _: 1_000_000)
    with pytest.raises(DownloadFailed, match="NPU_NODE_MODEL_STORE"):
        fetch_hub(REFERENCE, tmp_path / "d", Progress())
    assert not (tmp_path / "d/openvino_model.bin").exists()


@pytest.mark.parametrize("name", ["openvino_model.bin", "config.json"])
def test_a_file_that_is_not_the_declared_one_is_rejected_and_removed(hub, repository, tmp_path, name):
    repository.declared = {name: "0" * 64}
    with pytest.raises(HashMismatch, match=name):
        fetch_hub(REFERENCE, tmp_path / "d", Progress())
    assert not (tmp_path / "d" / name).exists()


@pytest.mark.parametrize(
    ("token", "reference", "reason"),
    [
        (None, REFERENCE, "gated"),
        ("hf_right", REFERENCE, "gated"),
        ("hf_wrong", REFERENCE, "401"),
        (None, HubReference("maker/none"), "RepositoryNotFound"),
        (None, HubReference("maker/model", "v9"), "RevisionNotFound"),
    ],
)
def test_what_the_hub_refuses_is_said_in_its_words(hub, repository, tmp_path, monkeypatch, token, reference, reason):
    repository.gated = True
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(DownloadFailed, match=rf"(?i){reason}.*HF_TOKEN.*licence") as caught:
        fetch_hub(reference, tmp_path / "d", Progress())
    assert "hf_" not in caught.value.message
    assert str(reference) in caught.value.message


def test_a_gated_repository_opens_for_the_token_of_a_member(hub, repository, tmp_path, monkeypatch):
    repository.gated = True
    hub.members.add("hf_member")
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    assert fetch_hub(REFERENCE, tmp_path / "d", Progress()).format is SourceFormat.OPENVINO


def test_a_hub_that_cannot_be_reached_says_what_to_check(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachable, match=r"http://127.0.0.1:9: ConnectError.*HF_ENDPOINT"):
        fetch_hub(REFERENCE, tmp_path / "d", Progress())


def test_a_file_that_a_hub_with_https_gives_without_it_is_not_taken(tmp_path, monkeypatch):
    def answer(request):
        if request.url.host == "hub.example":
            return httpx2.Response(302, headers={"Location": "http://mirror.example/weights"})
        return httpx2.Response(200, content=WEIGHTS)

    session = httpx2.Client(transport=httpx2.MockTransport(answer), follow_redirects=True)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    file = RemoteFile("openvino_model.bin", len(WEIGHTS), None, "0" * 40)
    with pytest.raises(DownloadFailed, match=r"leads to mirror\.example without https"):
        fetch_head(REFERENCE, Listing("maker/model", COMMIT, (file,)), file, tmp_path, 1000)
    assert not any(path.stat().st_size for path in tmp_path.iterdir())
