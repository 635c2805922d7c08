"""Where the files of an upload go, what a description of one means, and the forms of texts with times."""

import subprocess
import sys
import tempfile

import pytest

from worker_node.core.errors import InsufficientStorage
from worker_node.tasks.transcribe.http import scratch_directory, srt, vtt
from worker_node.tasks.transcribe.task import Span


def test_the_files_of_a_request_are_gone_when_it_ends(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_directory() as scratch:
        (scratch / "upload").write_bytes(b"x")
    assert not list(tmp_path.iterdir())


def test_without_a_temporary_directory_the_node_has_no_storage(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(InsufficientStorage, match="TMPDIR"), scratch_directory():
        pass


def test_the_edge_process_imports_no_decoder_for_the_routes_of_speech():
    script = "import sys, worker_node.tasks.transcribe.http; print({'av', 'openvino'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


SPANS = [Span(0.0, 1.5, " One."), Span(3599.9996, 3661.25, " Two\n\nlines --> here.")]


def test_subrip_counts_blocks_and_has_a_comma():
    assert srt(SPANS) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n2\n01:00:00,000 --> 01:01:01,250\nTwo lines -> here.\n"
    )


def test_webvtt_has_a_header_and_a_point():
    assert vtt(SPANS[:1]) == "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne.\n"
    assert vtt([]) == "WEBVTT\n"
