"""What a form asks for, what is given to the model, and what is counted and said of it."""

import io
import math
import re
import tempfile

import aiohttp
import msgspec
import numpy as np
import pytest
from multidict import MultiDict

from tests.support.application import application
from tests.support.published import install
from tests.support.scripted_runner import result_of
from tests.support.services import manager_of
from tests.support.speech import wav
from tests.support.task_models import HEARER, hearer, placement
from worker_node.core.errors import BadRequest, ConfigurationError, InsufficientStorage, UnsupportedParameter
from worker_node.core.types import NOT_MEASURED, Busy, Energy
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.models.catalog import Catalog
from worker_node.models.store import ModelStore
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.transcribe.building import TRANSCRIBE
from worker_node.tasks.transcribe.http import SpeechForm, scratch_directory, srt, vtt
from worker_node.tasks.transcribe.service import VoiceChoice, find_voice
from worker_node.tasks.transcribe.task import AudioOptions, Span

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
        self.busy = NOT_MEASURED
        self.inference_s = 0.0

    async def run(self, job, _result):
        self.heard.append(np.frombuffer(job.samples, "<i2"))
        result = msgspec.structs.replace(result_of(job), segments=self.spans, words=self.spans)
        yield msgspec.structs.replace(result, busy=self.busy, inference_s=self.inference_s)


@pytest.fixture
def ear():
    return Ear()


@pytest.fixture
async def send(store, ear):
    """Sends samples with fields of the form; returns the status and the body."""
    async with application([hearer(store, [placement(HEARER, ear)])]) as (client, node):

        async def send(samples, headers=None, **fields):
            form = aiohttp.FormData(default_to_multipart=True)
            form.add_field("file", io.BytesIO(wav(samples)), filename="a.wav")
            for name, value in fields.items():
                form.add_field(name, value)
            async with client.post("/v1/audio/transcriptions", data=form, headers=headers) as reply:
                return reply.status, await reply.json()

        send.registry = node.services.telemetry.registry
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


async def test_what_is_too_quiet_has_no_words_and_runs_no_model(send, ear):
    for case, samples in QUIET.items():
        status, body = await send(samples)
        assert (status, body["text"], ear.heard) == (200, "", []), case


async def test_a_device_that_a_request_requires_runs_a_second_of_silence_to_prove_it(send, ear):
    status, body = await send(np.zeros(RATE), headers={"X-NPU-Require-Device": "CPU"})
    assert (status, body["text"]) == (200, "")
    assert [(len(part), part.any()) for part in ear.heard] == [(RATE, False)]


async def test_what_is_louder_reaches_the_model_as_it_is(send, ear):
    for case, samples in LOUD.items():
        _, body = await send(samples)
        assert body["text"].endswith("bytes of speech"), case
        heard = ear.heard.pop()
        assert ear.heard == [], case
        assert np.array_equal(heard, samples[len(samples) - len(heard) :]), case


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


async def test_a_recording_costs_the_times_and_the_energy_of_all_of_its_windows(send, ear):
    ear.busy, ear.inference_s = Busy(1_500_000, energy=Energy(2.0)), 0.25
    await send(tone(-20, 70))
    windows = len(ear.heard)
    assert windows >= 3
    labels = {"model": HEARER, "emulated": "false", "exclusive": "unknown"}
    assert send.registry.get_sample_value("npu_node_npu_busy_seconds_total", labels) == 1.5 * windows
    joules = send.registry.get_sample_value("npu_node_energy_joules_total", labels | {"device": "CPU"})
    assert joules == 2.0 * windows
    labels = {"model": HEARER, "device": "CPU"}
    assert send.registry.get_sample_value("npu_node_request_inference_time_seconds_sum", labels) == 0.25 * windows


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


def read(fields):
    return SpeechForm.read(fields).voice()


async def found(store, limits, choice):
    return await find_voice(manager_of(store=store), limits, choice, math.inf)


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, (None, None, None, None)),
        ({"chunking_strategy": "auto"}, (True, None, None, None)),
        (
            {
                "chunking_strategy": '{"type":"server_vad","threshold":0.3,"silence_duration_ms":200,'
                '"prefix_padding_ms":100}'
            },
            (True, 0.3, 200, 100),
        ),
        # As the OpenAI SDK sends an object.
        ({"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "0.3"}, (True, 0.3, None, None)),
        ({"vad_filter": "False"}, (False, None, None, None)),
    ],
)
def test_both_spellings_are_read(fields, choice):
    voice = read(MultiDict(fields))
    assert (voice.wanted, voice.threshold, voice.silence_ms, voice.padding_ms) == choice


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vad_filter": "maybe"}, "vad_filter: Input should be a valid boolean"),
        ({"chunking_strategy": "never"}, "chunking_strategy: Input should be 'auto' or an object"),
        ({"chunking_strategy[threshold]": "0.5"}, r"chunking_strategy.type: Field required"),
        ({"chunking_strategy": '{"type":"server_vad","speed":1}'}, "chunking_strategy.speed: Extra inputs"),
        ({"chunking_strategy": '{"type":"server_vad","threshold":2}'}, "threshold: Input should be less than"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields, says):
    with pytest.raises(BadRequest, match=says):
        read(MultiDict(fields))


@pytest.fixture
def empty(tmp_path):
    return ModelStore(tmp_path)


async def test_without_the_network_only_those_who_insist_are_refused(empty):
    assert await found(empty, AudioOptions(), VoiceChoice()) is None
    assert await found(empty, AudioOptions(vad=True), VoiceChoice(wanted=False)) is None
    assert await found(empty, AudioOptions(), read(MultiDict(chunking_strategy="auto"))) is None
    for choice, limits in (
        (read(MultiDict(vad_filter="true")), AudioOptions()),
        (VoiceChoice(), AudioOptions(vad=True)),
    ):
        with pytest.raises(UnsupportedParameter, match="npu-node pull silero-vad") as refused:
            await found(empty, limits, choice)
        assert refused.value.param == choice.param


@pytest.fixture
def installed(tmp_path):
    """A store with the network; its file is not read here."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "silero_vad_16k_sequence.onnx").write_bytes(b"network")
    store = ModelStore(tmp_path / "store", Catalog(()))
    return store, install(store, source, "silero-vad").path


async def test_the_request_comes_before_the_options_of_the_model(installed):
    store, directory = installed
    wanted = ModelSettings(name="x", vad=True, vad_threshold=0.7, vad_silence_ms=900, vad_padding_ms=80)
    limits = wanted.of(AudioOptions)
    voice = await found(store, limits, VoiceChoice())
    network = directory / "silero_vad_16k_sequence.onnx"
    assert voice == (str(network), 0.7, 900, 80)
    voice = await found(store, limits, VoiceChoice(True, 0.2, 100, 0))
    assert voice == (str(network), 0.2, 100, 0)
    assert await found(store, limits, VoiceChoice(wanted=False)) is None
    # A file that is cut off is as good as none.
    network.write_bytes(b"net")
    with pytest.raises(UnsupportedParameter):
        await found(store, limits, VoiceChoice())


def test_a_model_that_skips_silence_by_default_needs_the_network(tmp_path):
    """Found out when the settings are read, and not by the first request."""
    wanted = ModelSettings(name="whisper", vad=True)
    with pytest.raises(
        ConfigurationError, match=f"npu-node pull silero-vad --model-store '?{re.escape(str(tmp_path))}"
    ):
        TRANSCRIBE.open(None, wanted, NodeSettings(model_store=tmp_path))


def test_the_files_of_a_request_are_gone_when_it_ends(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_directory() as scratch:
        (scratch / "upload").write_bytes(b"x")
    assert not list(tmp_path.iterdir())


def test_without_a_temporary_directory_the_node_has_no_storage(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(InsufficientStorage, match="TMPDIR"), scratch_directory():
        pass


def test_subrip_counts_blocks_and_has_a_comma_and_webvtt_a_header_and_a_point():
    spans = [Span(0.0, 1.5, " One."), Span(3599.9996, 3661.25, " Two\n\nlines --> here.")]
    assert srt(spans) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n2\n01:00:00,000 --> 01:01:01,250\nTwo lines -> here.\n"
    )
    assert vtt(spans[:1]) == "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne.\n"
    assert vtt([]) == "WEBVTT\n"
