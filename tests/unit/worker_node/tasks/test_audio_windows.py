"""Long audio is cut where it is quiet, completely, and without being read as a whole."""

from collections import deque

import numpy as np
import pytest

from worker_node.tasks.transcribe.audio import RATE, Window, next_window


def windows(path, *regions):
    left, found = deque(regions), []
    while (window := next_window(path, left)) is not None:
        found.append(window)
    return found


def seconds(begin, end):
    return Window(begin * RATE, end * RATE)


@pytest.fixture(scope="module")
def long_audio(tmp_path_factory):
    """100 s of noise, silent for half a second at 27 s and at 50 s."""
    samples = np.random.default_rng(0).integers(-9000, 9000, 100 * RATE).astype("<i2")
    for second in (27, 50):
        samples[second * RATE : int((second + 0.5) * RATE)] = 0
    path = tmp_path_factory.mktemp("audio") / "pcm"
    samples.tofile(path)
    return path, samples


def test_windows_end_in_pauses_and_cover_everything_once(long_audio):
    path, samples = long_audio
    found = windows(path, Window(0, len(samples)))
    assert 27 < found[0].seconds < 27.5
    assert 50 < found[1].end / RATE < 50.5
    assert [window.begin for window in found[1:]] == [window.end for window in found[:-1]]
    assert (found[0].begin, found[-1].end) == (0, len(samples))
    assert all(window.seconds <= 30 for window in found)
    assert found[1].offset_s == found[0].end / RATE


def test_audio_that_fits_is_one_window(long_audio):
    assert windows(long_audio[0], seconds(0, 30)) == [Window(0, 30 * RATE)]
    assert windows(long_audio[0], Window(0, 1)) == [Window(0, 1)]


def test_regions_within_thirty_seconds_share_a_window_with_the_silence_between_them(long_audio):
    regions = [seconds(1, 11), seconds(20, 31), seconds(40, 45), seconds(60, 61), seconds(99, 100)]
    assert windows(long_audio[0], *regions) == [seconds(1, 31), seconds(40, 61), seconds(99, 100)]


def test_what_is_left_of_a_long_region_is_joined_by_the_next(long_audio):
    first, second = windows(long_audio[0], seconds(1, 40), seconds(45, 50))
    assert first.begin == RATE
    assert 27 < first.end / RATE < 27.5
    assert second == Window(first.end, 50 * RATE)
