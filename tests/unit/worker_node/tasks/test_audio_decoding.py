"""What an upload may be, and what it may not make the node do."""

import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from worker_node.core.errors import BadRequest, InsufficientStorage
from worker_node.tasks.transcribe.audio import decode_audio

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


def pcm_wave(path, samples=TONE, *, channels=1, rate=16_000):
    with wave.open(str(path), "wb") as output:
        output.setparams((channels, 2, rate, 0, "NONE", ""))
        output.writeframes(samples.tobytes())
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
    ("container", "codec"),
    [
        ("flac", "flac"),
        ("mp3", "libmp3lame"),
        ("webm", "libopus"),
        ("mp4", "aac"),
    ],
)
def test_containers_in_common_use_are_decoded(tmp_path, container, codec):
    path = encoded(tmp_path / "a", container, codec, rate=48_000 if codec == "libopus" else 16_000)
    seconds, samples = decode(path, tmp_path / "pcm")
    assert seconds == pytest.approx(3.0, abs=0.2)
    assert samples.astype(np.int32).std() == pytest.approx(TONE.astype(np.int32).std(), rel=0.05)


@pytest.mark.parametrize(("container", "codec"), [("matroska", "flac"), ("ogg", "libopus"), ("mp4", "aac")])
def test_a_piece_of_a_long_stream_is_as_long_as_it_is(tmp_path, container, codec):
    path = encoded(tmp_path / "a", container, codec, rate=48_000 if codec == "libopus" else 16_000, begin=20_000.0)
    seconds, _ = decode(path, tmp_path / "pcm")
    assert seconds == pytest.approx(3.0, abs=0.2)


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
