"""Which blobs are taken: those that were compiled for exactly this model, machine and settings, and are unchanged."""

import errno
import os

import pytest

from worker_node.devices.blobs import RECORD_FILE, BlobRejected, check_blobs, require_npu, write_record
from worker_node.devices.npu import with_remedy

HERE = {
    "model_sha256": "aa",
    "device": "NPU",
    "architecture": "4000",
    "driver": "1.13.0",
    "compiler": "7.0",
    "openvino": "2026.4.1",
    "genai": "2026.4.1.0",
    "max_prompt_len": 1024,
    "npu_buckets": [32, 64],
}
NAME = "generate.blob"


@pytest.fixture
def blobs(tmp_path):
    (tmp_path / NAME).write_bytes(b"compiled" * 100)
    write_record(tmp_path, "small", HERE, [NAME])
    return tmp_path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"driver": "1.14.0"}, "driver was 1.13.0, and is 1.14.0 here"),
        ({"driver": None}, "driver was 1.13.0, and is not set or unknown here"),
        ({"device": "NPU-emulated"}, "device was NPU, and is NPU-emulated here"),
        ({"model_sha256": "bb"}, "compiled for something else (small): model_sha256 was aa"),
        ({"npu_buckets": [32]}, "npu_buckets was [32, 64], and is [32] here"),
        ({"prefill_hint": "STATIC"}, "prefill_hint was not set or unknown, and is STATIC here"),
    ],
)
def test_blobs_made_for_something_else_are_rejected_with_the_difference(blobs, change, reason):
    with pytest.raises(BlobRejected) as rejected:
        check_blobs(blobs, HERE | change, [NAME])
    assert reason in str(rejected.value)
    assert str(blobs) in str(rejected.value)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: os.truncate(path, 100), "its hash is not"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"D"), "its hash is not"),
        (os.unlink, "is missing"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "missing"),
    ],
    ids=["truncated", "one byte", "removed", "a pipe"],
)
def test_a_changed_blob_is_rejected_by_its_name_before_anything_native_reads_it(blobs, damage, reason):
    damage(blobs / NAME)
    with pytest.raises(BlobRejected, match=NAME) as rejected:
        check_blobs(blobs, HERE, [NAME])
    assert reason in str(rejected.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"\xff\xfe", b'{"version": 2}', b'{"version": 2, "origin": 3, "files": {}}', b"[" * 100_000],
    ids=["empty", "no fields", "no object", "no text", "too little", "wrong types", "too deep"],
)
def test_a_record_that_is_none_is_rejected_by_its_name(blobs, content):
    (blobs / RECORD_FILE).write_bytes(content)
    with pytest.raises(BlobRejected, match=RECORD_FILE):
        check_blobs(blobs, HERE, [NAME])


class CpuAlone:
    available_devices = ("CPU",)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOENT])
def test_an_npu_that_openvino_does_not_see_since_it_is_full_is_said_to_be(monkeypatch, number):
    def refused(*_arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("worker_node.devices.blobs.os.open", refused)
    with pytest.raises(RuntimeError, match="sees no NPU on this machine, only CPU") as raised:
        require_npu(CpuAlone(), {}, emulated=False)
    assert ("64 and 127 for one user" in with_remedy(str(raised.value))) == (number == errno.EMFILE)
