"""Regions of a recording are put together into passages, and times in a passage are those of the recording."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.tasks.transcribe.messages import Span
from worker_node.tasks.transcribe.windows import RATE, Passage, Window, next_passage


def window(begin, end):
    """From second to second."""
    return Window(round(begin * RATE), round(end * RATE))


# 10 s to 14 s, 40 s to 46 s and 100 s to 101 s: in the passage 0 to 4, 4 to 10 and 10 to 11.
PASSAGE = Passage((window(10, 14), window(40, 46), window(100, 101)))


def moved(method, begin, end):
    span = method(Span(begin, end, "text"))
    assert span.text == "text"
    return pytest.approx(span.begin), pytest.approx(span.end)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0.0, 2.0), (10.0, 12.0)),
        ((5.0, 9.5), (41.0, 45.5)),
        ((10.2, 10.9), (100.2, 100.9)),
        # At a seam, a beginning is that of the piece after it, an end that of the piece before.
        ((4.0, 10.0), (40.0, 46.0)),
        ((1.0, 6.0), (11.0, 42.0)),
        # A segment that only touches the piece before or after has no words there.
        ((3.8, 8.0), (40.0, 44.0)),
        ((1.0, 4.2), (11.0, 14.0)),
        ((3.5, 8.0), (13.5, 44.0)),
        # What a model reports beyond the audio ends with it.
        ((10.5, 12.0), (100.5, 101.0)),
        ((12.0, 13.0), (101.0, 101.0)),
    ],
)
def test_times_of_segments_are_those_of_the_recording(given, expected):
    assert moved(PASSAGE.segment, *given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1.0, 1.4), (11.0, 11.4)),
        # A word across a seam lies where its greater part is.
        ((3.9, 4.4), (40.0, 40.4)),
        ((3.5, 4.1), (13.5, 14.0)),
    ],
)
def test_a_word_stays_in_one_piece(given, expected):
    assert moved(PASSAGE.word, *given) == expected


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=6), st.data())
def test_every_sample_has_its_own_time(lengths, data):
    """The oracle writes the recording's time of each sample of the passage in a list."""
    pieces, place = [], 0
    for silence, speech in lengths:
        pieces.append(Window(place + silence, place + silence + speech))
        place += silence + speech
    clock = [sample for piece in pieces for sample in range(piece.begin, piece.end)]
    sample = data.draw(st.integers(0, len(clock) - 1))
    middle = Span((sample + 0.4) / RATE, (sample + 0.6) / RATE, "")
    assert Passage(tuple(pieces)).word(middle).begin * RATE == pytest.approx(clock[sample] + 0.4, abs=0.01)


@pytest.fixture(scope="module")
def pcm(tmp_path_factory):
    """200 s of noise that is quiet at 130 s."""
    samples = np.random.default_rng(0).integers(-9000, 9000, 200 * RATE).astype("<i2")
    samples[130 * RATE : int(130.5 * RATE)] = 0
    path = tmp_path_factory.mktemp("audio") / "pcm"
    samples.tofile(path)
    return path, samples


def taken(path, *regions):
    left, passages = deque(regions), []
    while (passage := next_passage(path, left)) is not None:
        passages.append(passage)
    return passages


def test_regions_share_a_passage_while_they_fit_into_thirty_seconds(pcm):
    path, samples = pcm
    regions = [window(1, 11), window(20, 35), window(50, 55), window(60, 61)]
    first, second = taken(path, *regions)
    assert first.pieces == tuple(regions[:3])
    assert second.pieces == tuple(regions[3:])
    assert np.array_equal(first.read(path), np.concatenate([samples[r.begin : r.end] for r in regions[:3]]))
    assert first.samples == 30 * RATE


def test_a_long_region_is_cut_in_a_pause_and_what_is_left_of_it_is_joined_by_the_next(pcm):
    long, short = window(104, 150), window(160, 165)
    first, second = taken(pcm[0], long, short)
    (cut,) = first.pieces
    assert (cut.begin, cut.end / RATE) == (long.begin, pytest.approx(130.25, abs=0.3))
    assert second.pieces == (Window(cut.end, long.end), short)


def test_without_regions_there_is_nothing_to_hear(pcm):
    assert taken(pcm[0]) == []
