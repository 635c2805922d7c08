"""What is given to the model, and what is counted and said of it, over HTTP.

Audio below -84 dBFS in every tenth of a second is too quiet to be speech.
"""

import io
import wave

import aiohttp
import msgspec
import numpy as np
import pytest

from tests.support.application import application
from tests.support.scripted_runner import result_of
from tests.support.task_models import HEARER, hearer, placement
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.tasks.transcribe.task import Span

RATE = 16_000
FULL_SCALE = 32_768


class Ear:
    """Says how many samples it was given, and keeps them."""

    ready = True
    recoveries = 0
    status = EngineStatus(EngineState.READY, None)

    def __init__(self):
        self.heard = []
        self.spans = ()

    async def run(self, job, _result):
        self.heard.append(np.frombuffer(job.samples, "<i2"))
        yield msgspec.structs.replace(result_of(job), segments=self.spans, words=self.spans)


@pytest.fixture
def ear():
    return Ear()


@pytest.fixture
async def send(store, ear):
    """Sends samples with fields of the form; returns the status and the body."""
    async with application([hearer(store, [placement(HEARER, ear)])]) as (client, node):

        async def send(samples, **fields):
            target = io.BytesIO()
            with wave.open(target, "wb") as file:
                file.setparams((1, 2, RATE, 0, "NONE", ""))
                file.writeframes(np.asarray(samples).astype("<i2").tobytes())
            form = aiohttp.FormData(default_to_multipart=True)
            form.add_field("file", io.BytesIO(target.getvalue()), filename="a.wav")
            for name, value in fields.items():
                form.add_field(name, value)
            async with client.post("/v1/audio/transcriptions", data=form) as reply:
                return reply.status, await reply.json()

        send.registry = node.services.telemetry.registry
        yield send
        await node.services.parts.close()


@pytest.fixture
def transcribe(send, ear):
    """Transcribes samples; returns the text, and what the model was given."""

    async def transcribe(samples):
        ear.heard.clear()
        status, body = await send(samples)
        assert status == 200, body
        return body["text"], list(ear.heard)

    return transcribe


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


async def test_silent_passages_count_as_skipped_and_not_as_heard(send):
    await send(np.concatenate([np.zeros(31 * RATE), tone(-60, 4)]))
    labels = {"model": HEARER, "device": "CPU"}
    heard, skipped = (
        send.registry.get_sample_value(f"npu_node_{name}_total", labels)
        for name in ("audio_seconds", "audio_skipped_seconds")
    )
    assert heard + skipped == pytest.approx(35)
    # The last passage begins at the latest 8 s before the end of the first 30 s.
    assert 4 <= heard <= 13


async def test_no_time_is_after_the_end_of_the_audio(send, ear):
    ear.spans = (Span(0.5, 1.0, "One"), Span(1.2, 29.98, "two"), Span(29.98, 30.0, "three"))
    times = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    samples = tone(-20, 1.2346)
    _, body = await send(samples, **times)
    spans = [(word["start"], word["end"]) for word in body["words"]]
    assert spans == [(0.5, 1.0), (1.2, body["duration"]), (body["duration"], body["duration"])]
    assert body["duration"] == 1.235
    _, body = await send(samples, response_format="verbose_json")
    assert [segment["end"] for segment in body["segments"]] == [1.0, 1.235, 1.235]


@pytest.mark.parametrize(
    ("seconds", "fields", "param"),
    [
        (1, {"language": "en"}, None),
        (1, {"language": "EN"}, None),
        (1, {"language": "de"}, "language"),
        (1, {"require_device": "NPU"}, "require_device"),
        (0.1, {}, None),
        (0.05, {}, "file"),
        (1 / RATE, {}, "file"),
    ],
)
async def test_what_a_form_asks_for_is_done_or_refused_by_name(send, seconds, fields, param):
    status, body = await send(tone(-20, seconds), **fields)
    assert (status, body.get("error", {}).get("param")) == (400 if param else 200, param)
    assert param != "file" or "at least 0.1 s" in body["error"]["message"]
