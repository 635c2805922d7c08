"""Reading of recordings for `transcribe`: bounded, and over when nobody waits for it any more."""

import asyncio
import threading

import pytest

from backend_client import InvalidArgument, arguments
from backend_client.errors import DeadlineExceeded
from backend_client.testing import FakeFleet


@pytest.fixture(scope="module")
def fleet():
    with FakeFleet(1) as fleet:
        yield fleet


@pytest.fixture
async def client(fleet):
    async with fleet.async_client() as made:
        yield made


class Endless:
    """A recording that goes on and on, a byte at a time."""

    def __init__(self):
        self.reading = threading.Event()

    def read(self, _size):
        self.thread = threading.current_thread()
        self.reading.set()
        return b"x"


async def over(endless):
    """Wait until it is read no more."""
    await asyncio.to_thread(endless.thread.join, 60)
    return not endless.thread.is_alive()


async def test_a_recording_is_read_no_further_when_the_time_is_up(client):
    endless = Endless()
    with pytest.raises(DeadlineExceeded):
        await client.transcribe(endless, timeout=0.3)
    assert await over(endless)


async def test_a_recording_is_read_no_further_when_the_caller_has_left(client):
    endless = Endless()
    call = asyncio.create_task(client.transcribe(endless, timeout=600))
    await asyncio.to_thread(endless.reading.wait, 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await over(endless)


@pytest.mark.parametrize("form", [lambda path: path, lambda path: path.read_bytes(), lambda path: path.open("rb")])
async def test_a_recording_that_is_too_large_to_send_is_refused(client, form, monkeypatch, tmp_path):
    monkeypatch.setattr(arguments, "MOST_BYTES", 1000)
    (tmp_path / "long.wav").write_bytes(bytes(1001))
    audio = form(tmp_path / "long.wav")
    try:
        with pytest.raises(InvalidArgument, match="at most 1000 bytes"):
            await client.transcribe(audio)
    finally:
        if hasattr(audio, "close"):
            audio.close()


async def test_an_endless_file_ends_at_the_bound(client, monkeypatch):
    monkeypatch.setattr(arguments, "MOST_BYTES", 1 << 22)
    with pytest.raises(InvalidArgument, match="at most"):
        await client.transcribe("/dev/zero")
