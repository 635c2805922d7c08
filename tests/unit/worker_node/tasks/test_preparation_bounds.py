"""What bad uploads cost the processes that decode them: counted in memory, frames and bytes, not in time."""

import base64
import io
import struct
import time
import zlib
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from worker_node.core.errors import BadRequest
from worker_node.sandbox.pool import PreparationLimits, PreparationPool
from worker_node.tasks.generate import images
from worker_node.tasks.transcribe import audio

LIMIT = 256 * 2**20
HUGE = (10_000, 10_000)


def chunk(name, content):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width, height, rows=b""):
    """A PNG of RGB whose header is true to the size and whose data are these."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", rows) if rows else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def saved(form, size=(900, 900), **options):
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8)
    Image.fromarray(noise).save(stream, form, **options)
    return stream.getvalue()


def bad_images():
    return {
        "empty": b"",
        "truncated JPEG": saved("JPEG")[:5000],
        "100 megapixels of PNG": png(*HUGE),
        # As many pixels as are allowed, and no data for them: memory for all of them is taken first.
        "50 megapixels without data": png(7_000, 7_000, zlib.compress(bytes(1000))),
        "50 megapixels cut in the middle": png(7_000, 7_000, zlib.compress(bytes(7_000 * 3 * 3_000))),
    }


def bomb():
    """Twice as many rows as the header says: the rest is left alone."""
    return png(100, 100, zlib.compress(bytes(64 * 2**20)))


def peak(pool):
    lines = [line for pid in pool.pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return max(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.linux
async def test_bad_images_are_refused_within_the_memory_for_bad_input_by_one_process():
    """The process with the limits of the node; what it may take for good images is more."""
    limits = PreparationLimits(processes=1, cpu_s=10.0, memory_bytes=3 * 2**29)
    pool = PreparationPool(limits, ("worker_node.tasks.generate.images",))
    try:
        await pool.start()
        pids = pool.pids
        for name, data in bad_images().items():
            with pytest.raises(BadRequest) as refused:
                await decode_image(pool, data)
            assert refused.value.param == "image", name
            assert len(refused.value.message) < 200
        width, height, pixels = await decode_image(pool, bomb())
        assert (width, height, len(pixels)) == (100, 100, 30_000)
        assert peak(pool) < LIMIT
        assert pool.pids == pids, "none of them ended the process"
    finally:
        await pool.close()


async def decode_image(pool, data):
    return await pool.run(
        images.decode,
        base64.b64encode(data).decode(),
        "image",
        10**6,
        None,
        deadline=time.monotonic() + 60,
        param="image",
    )


def wav(path, stated, samples=b""):
    """A WAV file whose header states so many bytes of samples, and that is as long, without taking room on the disk."""
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", 36, b"WAVE", b"fmt ", 16, 1, 1, 16_000, 32_000, 2, 16, b"data", stated
    )
    with path.open("wb") as file:
        file.write(head + samples)
        file.truncate(44 + stated)
    return path


SILENCE = np.zeros(48_000, np.int16)


def adts(path, repeated, samples=SILENCE):
    """AAC without a header for the whole: the same three seconds again and again."""
    with av.open(str(path), "w", format="adts") as output:
        stream = output.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = 16_000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    path.write_bytes(path.read_bytes() * repeated)
    return path


@pytest.mark.linux  # its memory is read in /proc
async def test_bad_audio_is_refused_within_the_memory_for_bad_input_by_one_process(tmp_path):
    pool = PreparationPool(
        PreparationLimits(processes=1, cpu_s=60.0, memory_bytes=2 * 2**30), ("worker_node.tasks.transcribe.audio",)
    )
    (tmp_path / "empty").touch()
    (tmp_path / "cut").write_bytes(adts(tmp_path / "whole", 1).read_bytes()[:5])
    bad = [tmp_path / "empty", tmp_path / "cut"]
    bad.append(wav(tmp_path / "ten hours", 36_000 * 32_000))
    bad.append(adts(tmp_path / "ten hours without a header", 12_000))
    target = tmp_path / "pcm"
    try:
        await pool.start()
        pids = pool.pids
        for path in bad:
            with pytest.raises(BadRequest) as refused:
                await pool.run(
                    audio.decode_audio, str(path), str(target), 4 * 3600.0, deadline=time.monotonic() + 60, param="file"
                )
            assert refused.value.param == "file", path.name
            assert target.stat().st_size == 0, "nothing was decoded"
        assert peak(pool) < LIMIT
        assert pool.pids == pids
    finally:
        await pool.close()
