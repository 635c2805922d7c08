"""Where speech begins and ends, by probabilities that are written down here, 32 ms each."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.tasks.transcribe import audio
from worker_node.tasks.transcribe.audio import RATE, find_speech, speech_regions
from worker_node.tasks.transcribe.audio import VOICE_FRAME as FRAME

# Threshold, silence and padding in milliseconds.
BARE, PADDED = (0.5, 320, 0), (0.5, 320, 320)
# So many frames of speech are a quarter of a second at least.
LONG, QUIET = 10, 20


def frames(*parts):
    """Probabilities of (count, probability) one after the other."""
    return [probability for count, probability in parts for _ in range(count)]


def found(*parts, rules=BARE, total=None):
    probabilities = frames(*parts)
    total = len(probabilities) * FRAME if total is None else total
    return [(begin / FRAME, end / FRAME) for begin, end in speech_regions(probabilities, total, *rules)]


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


def test_padding_stays_inside_the_audio_and_two_regions_share_what_lies_between():
    assert found((4, 0.0), (LONG, 0.9), (100, 0.0), (LONG, 0.9), (2, 0.0), rules=PADDED) == [(0, 24), (104, 126)]
    assert found((20, 0.0), (LONG, 0.9), (12, 0.0), (LONG, 0.9), (20, 0.0), rules=PADDED) == [(10, 36), (36, 62)]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.3, 0.4, 0.6, 1.0])), max_size=12),
    st.integers(0, 2000),
    st.integers(0, 2000),
)
def test_regions_are_apart_in_order_and_hold_all_speech_of_a_quarter_second(parts, silence_ms, padding_ms):
    probabilities = frames(*parts)
    total = len(probabilities) * FRAME
    regions = speech_regions(probabilities, total, 0.5, silence_ms, padding_ms)
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


class Loudness:
    """Takes loud frames for speech, and keeps what it was given."""

    def __init__(self):
        self.frames = []
        self.states = []

    def infer(self, given):
        self.frames.append(given["input"])
        self.states.append((float(given["h"][0, 0, 0]), float(given["c"][0, 0, 0])))
        loud = np.abs(given["input"][:, 64:]).mean(axis=1) > 0.1
        return {"speech_probs": loud.astype(np.float32), "hn": given["h"] + 1, "cn": given["c"] + 2}


@pytest.fixture
def scripted(monkeypatch):
    request = Loudness()
    monkeypatch.setattr(audio, "_compiled", lambda _path: request)
    return request


def test_every_frame_is_seen_once_after_the_end_of_the_one_before(scripted, tmp_path):
    samples = np.random.default_rng(0).integers(-2000, 2000, 40 * RATE + 77).astype("<i2")
    samples[20 * RATE : 22 * RATE] = 20_000
    samples.tofile(tmp_path / "pcm")
    ((begin, end),) = find_speech(str(tmp_path / "pcm"), "network", 0.5, 100, 0)
    assert (begin / RATE, end / RATE) == (pytest.approx(20, abs=0.033), pytest.approx(22, abs=0.033))
    assert max(len(block) for block in scripted.frames) == 512, "memory must not grow with the audio"
    assert scripted.states == [(0, 0), (1, 2), (2, 4)]
    given = np.concatenate(scripted.frames)
    # Written differently: one long row of samples, with 64 of silence before it and silence after it.
    padded = np.zeros(64 + len(given) * FRAME, np.float32)
    padded[64 : 64 + len(samples)] = samples / 32768
    wanted = [padded[place * FRAME : place * FRAME + 64 + FRAME] for place in range(len(given))]
    assert np.array_equal(given, np.stack(wanted))
