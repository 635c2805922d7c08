"""Decodes an uploaded file to mono PCM of 16 kHz, in a preparation process: FFmpeg's demuxers read hostile input.

What a file could do beyond giving samples is switched off: formats that refer to other files or hosts (playlists, image
sequences, devices) are not among those probed, and no protocol may be opened. Samples go to a file as they are decoded,
so memory does not grow with the length. Decoding ends at the longest audio that is taken; a file that is too long by
its header is rejected before any of it is decoded."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from worker_node.core.errors import BadRequest, InsufficientStorage

# PyAV is imported where it decodes: a node that serves no speech may lack it, and the edge process never decodes.
if TYPE_CHECKING:
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.frame import AudioFrame
    from av.container import InputContainer
    from av.error import FFmpegError

RATE = 16_000
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


def decode_audio(source: str, target: str, max_seconds: float) -> float:
    """Write the first audio stream of the file `source` to `target` as mono 16-bit PCM, 16 kHz; returns seconds.

    Raises BadRequest (`file`) when it is not audio that FFmpeg reads, damaged throughout, empty, too short or too
    long, and InsufficientStorage.
    """
    try:
        with Path(source).open("rb") as stream, Path(target).open("wb") as output:
            return _decode_stream(stream, output, max_seconds)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise InsufficientStorage(f"the disk with {Path(target).parent} is full; free space, or set TMPDIR") from None


def _decode_stream(stream: BinaryIO, output: BinaryIO, max_seconds: float) -> float:
    import av  # noqa: PLC0415
    from av.error import FFmpegError  # noqa: PLC0415

    try:
        with av.open(stream, "r", options=_CLOSED, metadata_errors="ignore") as container:
            # Some headers have the time of the end: pieces of a live stream begin late.
            begin = max(0, container.start_time or 0)
            if container.duration is not None and (container.duration - begin) / av.time_base > max_seconds:
                raise _too_long(max_seconds)
            return _decode(container, output, max_seconds)
    except FFmpegError as error:
        raise BadRequest(
            f"file: not audio in a known format ({_brief(error)}); send WAV, FLAC, MP3, Ogg, MP4, WebM or the like",
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


def _brief(error: FFmpegError) -> str:
    # Only the code's own words: the message may repeat a name from the file.
    return str(error.strerror or "unreadable")
