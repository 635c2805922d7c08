"""What an upload may be and may not make the node do, where speech is in it, and where it is cut into windows."""

from collections import deque
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.speech import wav
from worker_node.core.errors import BadRequest, InsufficientStorage
from worker_node.tasks.transcribe import audio
from worker_node.tasks.transcribe.audio import RATE, Window, decode_audio, find_speech, next_window, speech_regions
from worker_node.tasks.transcribe.audio import VOICE_FRAME as FRAME

TONE = (np.sin(np.arange(16_000 * 3) / 10) * 12_000).astype(np.int16)


def encoded(path, container, codec, *, rate=16_000, begin=0.0):
    """Three seconds of tone; its times begin at `begin`."""
    with av.open(str(path), "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        for number, part in enumerate(np.split(TONE, 30)):
            frame = av.AudioFrame.from_ndarray(part[None], format="s16", layout="mono")
            frame.sample_rate = 16_000
            if begin:
                frame.pts = round((begin + number / 10) * 16_000)
                frame.time_base = Fraction(1, 16_000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path


def pcm_wave(path, samples=TONE, **form):
    path.write_bytes(wav(samples, **form))
    return path


def decode(path, target, limit=60.0):
    seconds = decode_audio(str(path), str(target), limit)
    return seconds, np.fromfile(target, dtype="<i2")


def test_sixteen_kilohertz_mono_is_taken_over_sample_by_sample(tmp_path):
    seconds, samples = decode(pcm_wave(tmp_path / "a.wav"), tmp_path / "pcm")
    assert seconds == 3.0
    assert np.array_equal(samples, TONE)


def test_other_rates_and_channels_become_mono_of_sixteen_kilohertz(tmp_path):
    stereo = np.repeat(TONE, 2 * 3)
    seconds, samples = decode(pcm_wave(tmp_path / "a.wav", stereo, channels=2, rate=48_000), tmp_path / "pcm")
    assert seconds == pytest.approx(3.0, abs=0.01)
    assert np.corrcoef(samples[1000:40_000], TONE[1000:40_000])[0, 1] > 0.99


@pytest.mark.parametrize(
    ("container", "codec", "begin"),
    [
        ("flac", "flac", 0.0),
        ("mp4", "aac", 0.0),
        # A piece of a long stream.
        ("mp4", "aac", 20_000.0),
        ("matroska", "flac", 20_000.0),
        ("ogg", "libopus", 20_000.0),
    ],
)
def test_containers_in_common_use_are_decoded_whenever_their_times_begin(tmp_path, container, codec, begin):
    path = encoded(tmp_path / "a", container, codec, rate=48_000 if codec == "libopus" else 16_000, begin=begin)
    seconds, samples = decode(path, tmp_path / "pcm")
    assert seconds == pytest.approx(3.0, abs=0.2)
    assert samples.astype(np.int32).std() == pytest.approx(TONE.astype(np.int32).std(), rel=0.05)


def test_a_file_that_refers_to_others_is_not_followed(tmp_path):
    pcm_wave(tmp_path / "secret.wav")
    for name, text in (
        ("list.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\nsecret.wav\n#EXT-X-ENDLIST\n"),
        ("list.ffconcat", "ffconcat version 1.0\nfile secret.wav\n"),
        ("stream.sdp", "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(BadRequest, match="not audio in a known format"):
            decode(tmp_path / name, tmp_path / "pcm")


def test_a_file_that_hides_its_length_is_cut_off_at_the_limit(tmp_path):
    path = encoded(tmp_path / "a", "flac", "flac")
    content = bytearray(path.read_bytes())
    content[21:26] = bytes([content[21] & 0xF0, 0, 0, 0, 0])  # the number of samples: not known
    path.write_bytes(content)
    with pytest.raises(BadRequest, match="longer than 1 s"):
        decode(path, tmp_path / "pcm", limit=1.0)
    assert 32_000 < (tmp_path / "pcm").stat().st_size < 1.5 * 32_000


def test_a_codec_that_is_not_known_is_rejected(tmp_path):
    path = pcm_wave(tmp_path / "a.wav")
    content = bytearray(path.read_bytes())
    content[20:22] = (0x9999).to_bytes(2, "little")
    path.write_bytes(content)
    with pytest.raises(BadRequest, match="codec"):
        decode(path, tmp_path / "pcm")


def test_a_recording_whose_rate_changes_is_refused(tmp_path):
    parts = [encoded(tmp_path / str(rate), "adts", "aac", rate=rate).read_bytes() for rate in (16_000, 48_000)]
    (tmp_path / "whole").write_bytes(b"".join(parts))
    with pytest.raises(BadRequest, match="rate or channels change"):
        decode(tmp_path / "whole", tmp_path / "pcm")


def test_a_full_disk_is_the_nodes_want_of_storage_and_no_bug(tmp_path):
    target = Path("/dev/full")
    if not target.exists():
        pytest.skip("needs /dev/full")
    with pytest.raises(InsufficientStorage, match="TMPDIR"):
        decode_audio(str(pcm_wave(tmp_path / "a.wav")), str(target), 60.0)


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


def test_regions_within_thirty_seconds_share_a_window_with_the_silence_between_them(long_audio):
    assert windows(long_audio[0], Window(0, 1)) == [Window(0, 1)]
    regions = [seconds(1, 11), seconds(20, 31), seconds(40, 45), seconds(60, 61), seconds(99, 100)]
    assert windows(long_audio[0], *regions) == [seconds(1, 31), seconds(40, 61), seconds(99, 100)]


def test_what_is_left_of_a_long_region_is_joined_by_the_next(long_audio):
    first, second = windows(long_audio[0], seconds(1, 40), seconds(45, 50))
    assert first.begin == RATE
    assert 27 < first.end / RATE < 27.5
    assert second == Window(first.end, 50 * RATE)
