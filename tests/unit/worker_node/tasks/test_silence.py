"""What is too quiet to be speech is not given to the model: below -84 dBFS in every tenth of a second, over HTTP."""

import io
import wave

import aiohttp
import numpy as np
import pytest

from tests.support.application import application
from tests.support.scripted_runner import result_of
from tests.support.task_models import HEARER, hearer, placement
from worker_node.engines.protocol import EngineState, EngineStatus

RATE = 16_000
FULL_SCALE = 32_768


class Ear:
    """Says how many samples it was given, and keeps them."""

    ready = True
    recoveries = 0
    status = EngineStatus(EngineState.READY, None)

    def __init__(self):
        self.heard = []

    async def run(self, job, _result):
        self.heard.append(np.frombuffer(job.samples, "<i2"))
        yield result_of(job)


@pytest.fixture
async def transcribe(store):
    """Transcribes samples; returns the text, and what the model was given."""
    ear = Ear()
    async with application([hearer(store, [placement(HEARER, ear)])]) as (client, node):

        async def send(samples):
            ear.heard.clear()
            target = io.BytesIO()
            with wave.open(target, "wb") as file:
                file.setparams((1, 2, RATE, 0, "NONE", ""))
                file.writeframes(np.asarray(samples).astype("<i2").tobytes())
            form = aiohttp.FormData(default_to_multipart=True)
            form.add_field("file", io.BytesIO(target.getvalue()), filename="a.wav")
            async with client.post("/v1/audio/transcriptions", data=form) as reply:
                body = await reply.json()
                assert reply.status == 200, body
            return body["text"], list(ear.heard)

        yield send
        await node.services.parts.close()


def tone(level_db, seconds=1.0):
    """A square wave, whose root mean square is its height: the level in dB of full scale."""
    height = round(FULL_SCALE * 10 ** (level_db / 20))
    return np.where(np.arange(round(seconds * RATE)) // 20 % 2, height, -height)


QUIET = {
    "digital silence": np.zeros(RATE),
    "the noise of 16 bits": np.random.default_rng(1).integers(-1, 2, 3 * RATE),
    "a click of 10 ms at -78 dB": np.concatenate([np.zeros(RATE), tone(-78.3, 0.01), np.zeros(RATE)]),
}
LOUD = {
    "-84 dB": tone(-84.2),
    "a tenth of a second at -80 dB within 3 s of silence": np.concatenate(
        [np.zeros(RATE), tone(-80, 0.1), np.zeros(RATE)]
    ),
    "the last passage of two": np.concatenate([np.zeros(40 * RATE), tone(-60, 4)]),
}


async def test_what_is_too_quiet_has_no_words_and_the_device_is_asked_once_with_silence(transcribe):
    for case, samples in QUIET.items():
        text, heard = await transcribe(samples)
        assert text == "", case
        # The reply names a device, which must have been asked.
        assert [len(part) for part in heard] == [RATE], case
        assert not heard[0].any(), case


async def test_what_is_louder_reaches_the_model_as_it_is(transcribe):
    for case, samples in LOUD.items():
        text, heard = await transcribe(samples)
        assert text.endswith("bytes of speech"), case
        assert len(heard) == 1, case
        assert np.array_equal(heard[0], samples[len(samples) - len(heard[0]) :]), case
