"""Texts with times in the forms of players."""

from worker_node.tasks.transcribe.messages import Span
from worker_node.tasks.transcribe.service import srt, vtt, whole

SPANS = [Span(0.0, 1.5, " One."), Span(3599.9996, 3661.25, " Two\n\nlines --> here.")]


def test_subrip_counts_blocks_and_has_a_comma():
    assert srt(SPANS) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n2\n01:00:00,000 --> 01:01:01,250\nTwo lines -> here.\n"
    )


def test_webvtt_has_a_header_and_a_point():
    assert vtt(SPANS[:1]) == "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne.\n"
    assert vtt([]) == "WEBVTT\n"


def test_the_text_of_all_windows_begins_without_a_blank():
    assert whole([" One.", " Two."]) == "One. Two."
    assert whole([]) == ""
