"""The process that finds speech is killed while it listens: the recording is heard again, and nobody else notices.

It is held in the middle by a pipe in place of its network's file.
"""

import asyncio
import contextlib
import os
import signal
import time

import psutil
import pytest

from tests.support.speech import SPEECH
from tests.support.waiting import eventually
from worker_node.core.errors import EngineUnavailable
from worker_node.tasks.transcribe.service import AudioDecoder, Voice


async def reader_of(pipe):
    """Our end of a pipe, once somebody else has opened it for reading."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            await asyncio.sleep(0.01)


async def test_a_killed_listener_is_replaced_once_and_then_told_as_retryable(tmp_path):
    decoder = AudioDecoder()
    network, pcm = tmp_path / "network.onnx", tmp_path / "pcm"
    os.mkfifo(network)
    ends = []
    deadline = time.monotonic() + 100.0
    try:
        seconds = await decoder.decode(next(iter(SPEECH)), pcm, 60.0, deadline)
        (decoding,) = decoder._decoding.pids
        listening = asyncio.create_task(decoder.find_speech(pcm, Voice(str(network)), deadline))
        killed = set()
        for _ in range(2):
            ends.append(await reader_of(network))
            (pid,) = decoder._listening.pids
            assert not listening.done()
            assert await decoder.decode(next(iter(SPEECH)), tmp_path / "other", 60.0, deadline) == seconds
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
            # When it is gone, who reads the pipe is the next one.
            await eventually(lambda pid=pid: not psutil.pid_exists(pid))
        with pytest.raises(EngineUnavailable, match="killed; the request can be sent again"):
            await listening
        assert len(killed) == 2
        assert decoder._decoding.pids == {decoding}, "that which decodes went on"
    finally:
        for end in ends:
            os.close(end)
        await decoder.close()


async def test_a_short_recording_does_not_wait_for_a_long_one(tmp_path):
    decoder = AudioDecoder()
    deadline = time.monotonic() + 100.0
    ends, tasks = [], []
    try:
        for name, seconds in (("long", 1200), ("short", 1)):
            pcm, network = tmp_path / f"{name}.pcm", tmp_path / f"{name}.onnx"
            with pcm.open("wb") as file:
                file.truncate(seconds * 32_000)
            os.mkfifo(network)
            tasks.append(asyncio.create_task(decoder.find_speech(pcm, Voice(str(network)), deadline)))
            ends.append(await reader_of(network))
        assert not any(task.done() for task in tasks), "both are under way"
    finally:
        for end in ends:
            os.close(end)
        await decoder.close()
        await asyncio.gather(*tasks, return_exceptions=True)
