"""Where speech begins and ends, by probabilities that are written down here, 32 ms each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.tasks.transcribe.voice import FRAME, RATE, VoiceRules, speech_regions

BARE = VoiceRules(silence_ms=320, padding_ms=0)
# So many frames of speech are a quarter of a second at least.
LONG, QUIET = 10, 20


def frames(*parts):
    """Probabilities of (count, probability) one after the other."""
    return [probability for count, probability in parts for _ in range(count)]


def found(*parts, rules=BARE, total=None):
    """Regions in frames."""
    probabilities = frames(*parts)
    total = len(probabilities) * FRAME if total is None else total
    return [(begin / FRAME, end / FRAME) for begin, end in speech_regions(probabilities, total, rules)]


@pytest.mark.parametrize(
    ("parts", "regions"),
    [
        ([], []),
        ([(50, 0.1)], []),
        ([(50, 0.9)], [(0, 50)]),
        ([(5, 0.0), (LONG, 0.9), (QUIET, 0.0)], [(5, 15)]),
        # Silence of ten frames, 320 ms, ends a region; of nine it does not.
        ([(LONG, 0.9), (9, 0.0), (LONG, 0.9)], [(0, 29)]),
        ([(LONG, 0.9), (10, 0.0), (LONG, 0.9)], [(0, 10), (20, 30)]),
        # Speech that grows faint goes on down to 0.35; where it begins, it must reach 0.5.
        ([(LONG, 0.9), (30, 0.4), (LONG, 0.9)], [(0, 50)]),
        ([(LONG, 0.9), (30, 0.3), (LONG, 0.9)], [(0, 10), (40, 50)]),
        ([(30, 0.4), (LONG, 0.9)], [(30, 40)]),
        # A click of 7 frames, 224 ms, is no speech; 8 frames are.
        ([(QUIET, 0.0), (7, 0.9), (QUIET, 0.0)], []),
        ([(QUIET, 0.0), (8, 0.9), (QUIET, 0.0)], [(20, 28)]),
    ],
)
def test_regions_begin_and_end_where_the_probabilities_say(parts, regions):
    assert found(*parts) == regions


def test_a_region_that_the_audio_cuts_off_ends_with_it():
    assert speech_regions([0.9] * 10, 9 * FRAME + 100, BARE) == [(0, 9 * FRAME + 100)]


def test_a_higher_threshold_wants_clearer_speech():
    assert found((LONG, 0.7), rules=VoiceRules(0.5)) == [(0, 10)]
    assert found((LONG, 0.7), rules=VoiceRules(0.8)) == []


def test_padding_stays_inside_the_audio_and_two_regions_share_what_lies_between():
    padded = VoiceRules(silence_ms=320, padding_ms=320)
    assert found((4, 0.0), (LONG, 0.9), (100, 0.0), (LONG, 0.9), (2, 0.0), rules=padded) == [(0, 24), (104, 126)]
    assert found((20, 0.0), (LONG, 0.9), (12, 0.0), (LONG, 0.9), (20, 0.0), rules=padded) == [(10, 36), (36, 62)]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.3, 0.4, 0.6, 1.0])), max_size=12),
    st.integers(0, 2000),
    st.integers(0, 2000),
)
def test_regions_are_apart_in_order_and_hold_all_speech_of_a_quarter_second(parts, silence_ms, padding_ms):
    probabilities = frames(*parts)
    total = len(probabilities) * FRAME
    regions = speech_regions(probabilities, total, VoiceRules(0.5, silence_ms, padding_ms))
    places = [place for region in regions for place in region]
    assert places == sorted(places)
    assert all(0 <= begin < end <= total for begin, end in regions)
    covered = {frame for begin, end in regions for frame in range(begin // FRAME, -(-end // FRAME))}
    run = 0
    for frame, probability in enumerate([*probabilities, 0.0]):
        if probability >= 0.5:
            run += 1
        else:
            if run * FRAME >= RATE / 4:
                assert covered >= set(range(frame - run, frame))
            run = 0
