"""Decodes an upload, finds speech in it, and cuts it into windows that a model hears one by one.

Decoding gives mono PCM of 16 kHz. It runs in a preparation process: FFmpeg's demuxers read hostile input. What a file
could do beyond giving samples is switched off: formats that refer to other files or hosts (playlists, image sequences,
devices) are not among those probed, and no protocol may be opened. Samples go to a file as they are decoded, so memory
does not grow with the length. Decoding ends at the longest audio that is taken; a file that is too long by its header
is rejected before any of it is decoded.

Speech is found by Silero's network for voice activity, in a preparation process, too."""

from __future__ import annotations

import errno
import functools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from worker_node.core.errors import BadRequest, InsufficientStorage
from worker_node.tasks.transcribe.task import RATE

# PyAV is imported where it decodes: a node that serves no speech may lack it, and the edge process never decodes.
if TYPE_CHECKING:
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.frame import AudioFrame
    from av.container import InputContainer

_FILE = "file"
# Containers with audio that stand alone.
_FORMATS = (
    "aac,ac3,aiff,amr,amrnb,amrwb,ape,asf,au,avi,caf,dsf,dts,eac3,flac,flv,gsm,iff,latm,loas,matroska,webm,mov,mp4,m4a,3gp,3g2,"
    "mj2,mp3,mpc,mpc8,mpeg,mpegts,mxf,nut,ogg,oma,qcp,rm,sbc,sox,tak,truehd,tta,voc,w64,wav,wv,xwma"
)
_CLOSED = {"format_whitelist": _FORMATS, "protocol_whitelist": "none", "probesize": "5000000"}
# OpenAI's least length, too. For less, models invent a word.
_LEAST_S = 0.1
# More damaged packets than this, and the rest of the file is not worth the time.
_DAMAGED_PACKETS = 50
# A full disk, a quota, and the largest file that a process may write.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def full_disk_reported(directory: Path) -> Iterator[None]:
    """Raise InsufficientStorage where a write below the directory fails for want of space."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise InsufficientStorage(f"the disk with {directory} is full; free space, or set TMPDIR") from None


def decode_audio(source: str, target: str, max_seconds: float) -> float:
    """Write the first audio stream of the file `source` to `target` as mono 16-bit PCM, 16 kHz; returns seconds.

    Raises BadRequest (`file`) when it is not audio that FFmpeg reads, damaged throughout, empty, too short or too
    long, and InsufficientStorage.
    """
    import av  # noqa: PLC0415
    from av.error import FFmpegError  # noqa: PLC0415

    try:
        with (
            full_disk_reported(Path(target).parent),
            Path(source).open("rb") as stream,
            Path(target).open("wb") as output,
            av.open(stream, "r", options=_CLOSED, metadata_errors="ignore") as container,
        ):
            # Some headers have the time of the end: pieces of a live stream begin late.
            begin = max(0, container.start_time or 0)
            if container.duration is not None and (container.duration - begin) / av.time_base > max_seconds:
                raise _too_long(max_seconds)
            return _decode(container, output, max_seconds)
    except FFmpegError as error:
        # Only the code's own words: the message may repeat a name from the file.
        raise BadRequest(
            f"file: not audio in a known format ({error.strerror or 'unreadable'}); send WAV, FLAC, MP3, Ogg, MP4, "
            "WebM or the like",
            param=_FILE,
        ) from None


def _decode(container: InputContainer, output: BinaryIO, max_seconds: float) -> float:
    from av.audio.resampler import AudioResampler  # noqa: PLC0415
    from av.error import FFmpegError  # noqa: PLC0415

    if not container.streams.audio:
        raise BadRequest("file: it has no audio stream", param=_FILE)
    stream = container.streams.audio[0]

    # None, whatever the type says, where FFmpeg has no decoder.
    codec: AudioCodecContext | None = stream.codec_context
    if codec is None:
        raise BadRequest("file: its audio is in a codec that FFmpeg does not know", param=_FILE)
    codec.thread_type = "NONE"
    resampler = AudioResampler(format="s16", layout="mono", rate=RATE)
    most, written, damaged = int(max_seconds * RATE), 0, 0
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except FFmpegError:
            damaged += 1
            if damaged > _DAMAGED_PACKETS:
                break
            continue
        for frame in frames:
            try:
                written += _write(resampler.resample(frame), output)
            except ValueError:
                raise BadRequest("file: its rate or channels change on the way; send the parts", param=_FILE) from None
            if written > most:
                raise _too_long(max_seconds)

    written += _write(resampler.resample(None), output)
    if not written:
        raise BadRequest("file: it holds no audio that can be decoded", param=_FILE)
    if written < _LEAST_S * RATE:
        raise BadRequest(
            f"file: the audio must be at least {_LEAST_S:g} s long, got {written / RATE:.3g} s", param=_FILE
        )
    return written / RATE


def _write(frames: list[AudioFrame], output: BinaryIO) -> int:
    written = 0
    for frame in frames:
        samples = frame.to_ndarray()
        output.write(samples.astype("<i2", copy=False).tobytes())
        written += samples.size
    return written


def _too_long(max_seconds: float) -> BadRequest:
    return BadRequest(f"file: the audio is longer than {max_seconds:g} s, the limit of this node", param=_FILE)


# The network gives one probability for each 32 ms.
VOICE_FRAME = 512
# Speech goes on while its probability stays above the threshold less this.
_HYSTERESIS = 0.15
_SHORTEST_S = 0.25

Region = tuple[int, int]


def speech_regions(
    probabilities: Iterable[float], total: int, threshold: float, silence_ms: int, padding_ms: int
) -> list[Region]:
    """Regions of speech as (first sample, sample after the last), in order and apart from each other.

    `probabilities` has one value for each frame of 512 samples of `total`, the last frame being cut short; those from
    `threshold` on are speech. A silence shorter than `silence_ms` does not end a region, and each region gets
    `padding_ms` of what surrounds it. Speech of less than 0.25 s is left out.
    """
    found: list[Region] = []
    patience = silence_ms * RATE // 1000
    begin: int | None = None
    quiet_since: int | None = None
    for frame, probability in enumerate(probabilities):
        place = frame * VOICE_FRAME
        if probability >= threshold:
            begin, quiet_since = (place if begin is None else begin), None
        elif begin is not None and probability < threshold - _HYSTERESIS:
            quiet_since = place if quiet_since is None else quiet_since
            if place + VOICE_FRAME - quiet_since >= patience:
                found.append((begin, quiet_since))
                begin = quiet_since = None

    if begin is not None:
        found.append((begin, total if quiet_since is None else quiet_since))
    spoken = [region for region in found if region[1] - region[0] >= _SHORTEST_S * RATE]
    return _padded(spoken, total, padding_ms * RATE // 1000)


def _padded(regions: list[Region], total: int, padding: int) -> list[Region]:
    padded: list[Region] = []
    for place, (begin, end) in enumerate(regions):
        after = regions[place + 1][0] if place + 1 < len(regions) else None
        # Two regions share what lies between them.
        most = end + padding if after is None else min(end + padding, (end + after) // 2)
        least = max(padded[-1][1], begin - padding) if padded else max(0, begin - padding)
        padded.append((least, min(total, most)))
    return padded


# The network sees the end of the frame before each frame.
_CONTEXT = 64
# 16 s in one call, which takes 20 ms; the network's recurrent part runs inside of it.
_BLOCK = 512
_STATE = (1, 1, 128)
_FULL_SCALE = np.float32(32768.0)


def find_speech(pcm: str, network: str, threshold: float, silence_ms: int, padding_ms: int) -> list[Region]:
    """The `speech_regions` of the file `pcm`, 16-bit mono samples of 16 kHz; `network` is the file of Silero's.

    Each call of the network takes a block of frames with the state that the block before it left, so memory does not
    grow with the length.
    """
    probabilities = _probabilities(Path(pcm), _compiled(network))
    return speech_regions(probabilities, Path(pcm).stat().st_size // 2, threshold, silence_ms, padding_ms)


@functools.cache
def _compiled(network: str) -> Any:
    import openvino as ov  # noqa: PLC0415  (never in the edge process)

    core = ov.Core()
    # One thread: others decode and transcribe meanwhile. f32: probabilities must not depend on the processor.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    return core.compile_model(core.read_model(network), "CPU", settings).create_infer_request()


def _probabilities(pcm: Path, request: Any) -> Iterator[float]:
    hidden, cell = np.zeros(_STATE, np.float32), np.zeros(_STATE, np.float32)
    before = np.zeros(_CONTEXT, np.float32)
    with pcm.open("rb") as file:
        while data := file.read(2 * VOICE_FRAME * _BLOCK):
            samples = np.frombuffer(data, "<i2").astype(np.float32) / _FULL_SCALE
            count = -(-len(samples) // VOICE_FRAME)
            frames = np.zeros((count, VOICE_FRAME), np.float32)
            frames.reshape(-1)[: len(samples)] = samples
            context = np.vstack((before, frames[:-1, -_CONTEXT:]))
            result = request.infer({"input": np.hstack((context, frames)), "h": hidden, "c": cell})
            hidden, cell, before = result["hn"].copy(), result["cn"].copy(), frames[-1, -_CONTEXT:].copy()
            yield from result["speech_probs"].reshape(-1).tolist()


# What a Whisper network hears at once.
LONGEST_S = 30.0
# A window may end this much earlier, at the quietest place.
_SLACK_S = 8.0
_FRAME = RATE // 50
# The pauses between words are longer than this.
_PAUSE_FRAMES = 10


@dataclass(frozen=True, slots=True)
class Window:
    """Samples `begin` up to `end` of the whole."""

    begin: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / RATE


def read_samples(path: Path, window: Window) -> NDArray[np.int16]:
    """The window's samples of a file of 16-bit PCM."""
    return np.fromfile(path, dtype="<i2", count=window.end - window.begin, offset=2 * window.begin)


def next_window(path: Path, regions: deque[Window]) -> Window | None:
    """Take the next window of at most 30 s from `regions`, which are in order; None when none is left.

    Regions that lie within 30 s become one window, with the silence between them. A longer region is cut at the
    quietest place of its last 8 s; only that much of the file is read.
    """
    if not regions:
        return None
    begin, longest = regions[0].begin, int(LONGEST_S * RATE)
    end = None
    while regions and regions[0].end - begin <= longest:
        end = regions.popleft().end
    if end is not None:
        return Window(begin, end)
    first = begin + longest - int(_SLACK_S * RATE)
    cut = first + quietest(read_samples(path, Window(first, begin + longest)))
    regions[0] = Window(cut, regions[0].end)
    return Window(begin, cut)


def quietest(samples: NDArray[np.int16]) -> int:
    """The sample in the middle of the quietest 0.2 s; the last such place where several are equally quiet."""
    frames = len(samples) // _FRAME
    loudness = np.abs(samples[: frames * _FRAME].astype(np.int32)).reshape(frames, _FRAME).sum(axis=1)
    pauses = np.convolve(loudness, np.ones(_PAUSE_FRAMES, dtype=np.int64), mode="valid")
    last = len(pauses) - 1 - int(np.argmin(pauses[::-1]))
    return (last + _PAUSE_FRAMES // 2) * _FRAME
