"""How the network is fed: in blocks, each frame after the end of the one before, with the state of the block before.

The network here is scripted; the real one hears real speech in tests/real/test_transcription.py.
"""

import numpy as np
import pytest

from worker_node.tasks.transcribe import voice
from worker_node.tasks.transcribe.voice import FRAME, RATE


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
    monkeypatch.setattr(voice, "_compiled", lambda _path: request)
    return request


def test_every_frame_is_seen_once_after_the_end_of_the_one_before(scripted, tmp_path):
    samples = np.random.default_rng(0).integers(-2000, 2000, 40 * RATE + 77).astype("<i2")
    samples[20 * RATE : 22 * RATE] = 20_000
    samples.tofile(tmp_path / "pcm")
    ((begin, end),) = voice.find_speech(str(tmp_path / "pcm"), "network", 0.5, 100, 0)
    assert (begin / RATE, end / RATE) == (pytest.approx(20, abs=0.033), pytest.approx(22, abs=0.033))
    assert max(len(block) for block in scripted.frames) == 512, "memory must not grow with the audio"
    assert scripted.states == [(0, 0), (1, 2), (2, 4)]
    given = np.concatenate(scripted.frames)
    # Written differently: one long row of samples, with 64 of silence before it and silence after it.
    padded = np.zeros(64 + len(given) * FRAME, np.float32)
    padded[64 : 64 + len(samples)] = samples / 32768
    wanted = [padded[place * FRAME : place * FRAME + 64 + FRAME] for place in range(len(given))]
    assert np.array_equal(given, np.stack(wanted))


def test_audio_shorter_than_a_frame_is_looked_at_too(scripted, tmp_path):
    np.full(100, 30_000, "<i2").tofile(tmp_path / "pcm")
    assert voice.find_speech(str(tmp_path / "pcm"), "network", 0.5, 100, 0) == []
    assert [block.shape for block in scripted.frames] == [(1, 64 + FRAME)]
