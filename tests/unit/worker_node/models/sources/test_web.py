"""One file by URL: continued after a broken connection, and verified against the hash that was given."""

import hashlib

import pytest

from worker_node.core.errors import BadRequest, DownloadFailed, HashMismatch
from worker_node.core.types import Silent
from worker_node.models.sources import disk
from worker_node.models.sources.downloads import fetch_url
from worker_node.models.sources.reference import UrlReference

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def reference(hub):
    hub.files["m.gguf"] = CONTENT
    return UrlReference(f"{hub.endpoint}/files/m.gguf", SHA256)


@pytest.fixture
def fetch(tmp_path, monkeypatch):
    """Fetches without waiting between tries; `waits` are the seconds that it would have waited."""

    def fetch(reference, **options):
        return fetch_url(reference, tmp_path, Silent(), **options)

    fetch.waits = []
    monkeypatch.setattr("worker_node.models.sources.downloads.time.sleep", fetch.waits.append)
    return fetch


def spans(hub):
    return [span for name, span in hub.large_downloads() if name == "m.gguf"]


def test_the_file_arrives_verified(fetch, reference, tmp_path):
    assert fetch(reference) == {"m.gguf": SHA256}
    assert (tmp_path / "m.gguf").read_bytes() == CONTENT


def test_a_cut_connection_is_continued_where_it_broke(hub, fetch, reference, tmp_path):
    hub.cuts["m.gguf"] = [300_000, 200_000, 100_000]
    fetch(reference)
    assert (tmp_path / "m.gguf").read_bytes() == CONTENT
    assert spans(hub) == [None, "bytes=300000-", "bytes=500000-", "bytes=600000-"]


def test_a_try_that_failed_is_continued_by_the_next_one(hub, fetch, reference, tmp_path):
    hub.cuts["m.gguf"] = [300_000, *[0] * 20]
    with pytest.raises(DownloadFailed, match=r"0\.3 MB arrived and are kept: pull again to continue"):
        fetch(reference)
    hub.cuts.clear()
    hub.asked.clear()
    fetch(reference)
    assert spans(hub) == ["bytes=300000-"]
    assert (tmp_path / "m.gguf").read_bytes() == CONTENT


def test_tries_end_when_nothing_arrives_any_more(hub, fetch, reference):
    hub.cuts["m.gguf"] = [0] * 100
    with pytest.raises(DownloadFailed):
        fetch(reference)
    assert len(spans(hub)) == 5
    assert fetch.waits == [1.0] * 4


def test_a_server_without_ranges_sends_it_all_again(hub, fetch, reference, tmp_path):
    hub.ignore_ranges = True
    hub.cuts["m.gguf"] = [300_000]
    fetch(reference)
    assert (tmp_path / "m.gguf").read_bytes() == CONTENT


def test_the_wrong_hash_is_told_with_both_and_the_file_removed(fetch, reference, tmp_path):
    with pytest.raises(HashMismatch, match=f"has sha256 {SHA256}, you gave {'0' * 64}"):
        fetch(UrlReference(reference.url, "0" * 64))
    assert not list(tmp_path.glob("*.gguf"))


def test_a_url_without_a_hash_is_rejected_before_anything_is_asked(hub, fetch, reference):
    with pytest.raises(BadRequest, match="#sha256="):
        fetch(UrlReference(reference.url, None))
    with pytest.raises(BadRequest, match="only https"):
        fetch(UrlReference(reference.url, None), insecure_no_hash=True)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("status", "word"), [(401, "login"), (403, "licence"), (404, "no such file"), (418, "refused")]
)
def test_a_refusal_is_final_and_says_why(hub, fetch, reference, status, word):
    hub.statuses["m.gguf"] = [status]
    with pytest.raises(DownloadFailed, match=rf"{word}.*\({status}\)"):
        fetch(reference)
    assert len(spans(hub)) == 1


def test_a_server_that_is_busy_is_asked_again(hub, fetch, reference):
    hub.statuses["m.gguf"] = [503, 429]
    assert fetch(reference) == {"m.gguf": SHA256}


def test_a_disk_that_is_too_small_is_said_before_the_file_comes(hub, fetch, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free_space", lambda _: 1_000_000)
    with pytest.raises(DownloadFailed, match="NPU_NODE_MODEL_STORE"):
        fetch(reference)
    assert not list(tmp_path.glob("*.gguf"))
