"""Speech recognition with Whisper tiny.en on the CPU and on the NPU path: real speech, real engines, stock clients.

One node with one model in two places; its start and the recognition of the speech on both are most of this file's time.
"""

import io
import json
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import aiohttp
import numpy as np
import openai
import pytest

from tests.support.nodes import start_node
from tests.support.speech import SPEECH, pcm, reference_words, wav, word_errors
from tests.support.whisper import MODEL
from worker_node.core.types import Device
from worker_node.engines.protocol import EngineSpec
from worker_node.serving.task import Target
from worker_node.settings import ModelSettings
from worker_node.tasks.transcribe.building import TRANSCRIBE
from worker_node.tasks.transcribe.engine import TranscribeRunner
from worker_node.tasks.transcribe.task import VOICE_MODEL, TranscribeJob, TranscribeOptions, Transcript

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PATH = "/v1/audio/transcriptions"
# Where the device does not matter: it takes a third of the emulated NPU's time.
ON_CPU = {"X-NPU-Require-Device": "CPU"}


@pytest.fixture(scope="module")
def node(speech_store, tmp_path_factory):
    config = tmp_path_factory.mktemp("speech") / "node.toml"
    config.write_text(
        f'[[models]]\nname = "{MODEL}"\nplacements = ["NPU", "CPU"]\nmax_audio_minutes = 2\nmax_audio_mb = 8\n'
    )
    environment = {"NPU_NODE_NPU_EMULATION": "1", "NPU_NODE_MODEL_STORE": str(speech_store.root)}
    with start_node("--config", str(config), **environment) as running:
        yield running


@pytest.fixture
async def send(node, http):
    async def post(content, *, path=PATH, headers=None, name="speech.ogg", **fields):
        form = aiohttp.FormData(default_to_multipart=True)
        for field, values in fields.items():
            for value in values if isinstance(values, list) else [values]:
                form.add_field(field, value)
        if content is not None:
            form.add_field("file", io.BytesIO(content), filename=name)
        async with http.post(node.url + path, data=form, headers=headers) as reply:
            body = await reply.json() if reply.content_type == "application/json" else await reply.text()
            return reply.status, reply.headers, body

    return post


@pytest.mark.parametrize("device", ["NPU", "CPU"])
async def test_at_most_one_word_in_twenty_is_wrong(send, device, long):
    """All sentences on the CPU; on the emulated NPU, which takes three times as long, two of them without --long."""
    errors = words = 0
    spoken = list(SPEECH.items())
    for file, text in spoken if device == "CPU" or long else spoken[:2]:
        status, headers, body = await send(file.read_bytes(), headers={"X-NPU-Require-Device": device})
        assert status == 200, body
        assert headers["X-NPU-Node-Device"] == device
        if device == "NPU":
            assert headers["X-NPU-Emulated"] == "true"
            assert int(headers["X-NPU-Busy-Delta-Us"]) > 0
        errors += word_errors(body["text"], text)
        words += len(reference_words(text))
    assert words == 71 or not (device == "CPU" or long)
    assert errors / words <= 0.05, f"{errors} of {words} words"


async def test_times_of_words_and_segments_grow_and_stay_inside_the_audio(send):
    file = next(iter(SPEECH))
    wanted = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    status, headers, body = await send(file.read_bytes(), **wanted)
    assert status == 200
    # The NPU's fast decoder gives no times of words.
    assert (headers["X-NPU-Node-Device"], headers["X-NPU-Node-Route-Reason"]) == ("CPU", "unsupported_on_npu")
    assert (body["task"], body["language"]) == ("transcribe", "en")
    assert body["duration"] == pytest.approx(7.1, abs=0.1)
    times = [time for word in body["words"] for time in (word["start"], word["end"])]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= body["duration"] + 0.1
    assert " ".join(word["word"] for word in body["words"]) == body["text"]
    assert "".join(segment["text"] for segment in body["segments"]).strip() == body["text"]
    assert body["segments"][-1]["end"] <= body["duration"] + 0.1


async def test_word_times_of_the_npu_are_refused_with_the_option_that_gives_them(send):
    wanted = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    status, _, body = await send(next(iter(SPEECH)).read_bytes(), headers={"X-NPU-Require-Device": "NPU"}, **wanted)
    assert (status, body["error"]["param"]) == (400, "timestamp_granularities[]")
    assert "word_timestamps = true" in body["error"]["message"]


async def test_long_audio_is_heard_in_windows_whose_times_go_on(send):
    """All sentences twice: 50 s, cut in pauses."""
    sentences = [pcm(file) for file in SPEECH]
    whole = np.concatenate(sentences * 2)
    status, _, body = await send(wav(whole), response_format="verbose_json", headers=ON_CPU)
    assert status == 200
    assert body["duration"] == pytest.approx(len(whole) / 16_000, abs=0.01)
    starts = [segment["start"] for segment in body["segments"]]
    assert starts == sorted(starts)
    assert starts[-1] > 40
    text = " ".join(SPEECH.values())
    assert word_errors(body["text"], f"{text} {text}") / (2 * 71) <= 0.1


def noise(seconds):
    """Faint noise, louder than what counts as silence."""
    return np.random.default_rng(5).normal(0, 150, round(seconds * 16_000)).astype(np.int16)


async def test_silence_is_skipped_and_times_stay_those_of_the_recording(send, node, http):
    """Two sentences in 90 s of noise, in any of which alone the model would invent words."""
    (first, said), (second, answered) = list(SPEECH.items())[:2]
    parts = [noise(15), pcm(first), noise(45), pcm(second), noise(20)]
    places = np.cumsum([0, *map(len, parts)]) / 16_000
    granularities = {"timestamp_granularities[]": ["word", "segment"]}
    before = await skipped(node, http)
    status, _, body = await send(
        wav(np.concatenate(parts)), response_format="verbose_json", vad_filter="true", headers=ON_CPU, **granularities
    )
    assert status == 200, body
    assert word_errors(body["text"], f"{said} {answered}") <= 3
    assert body["duration"] == pytest.approx(places[-1], abs=0.01)
    for kind, text in (("words", "word"), ("segments", "text")):
        spoken = [
            " ".join(part[text] for part in body[kind] if begin - 0.4 <= part["start"] < part["end"] <= end + 0.4)
            for begin, end in (places[1:3], places[3:5])
        ]
        assert sum(map(word_errors, spoken, (said, answered))) <= 3, body[kind]
    assert await skipped(node, http) - before == pytest.approx(80, abs=3)


async def skipped(node, http):
    """Seconds of audio that the node has skipped."""
    async with http.get(node.url + "/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("npu_node_audio_skipped_seconds"))


async def test_audio_without_speech_has_no_text(node):
    """In the words of OpenAI's SDK."""
    async with straight(node.url) as client:
        said = await client.audio.transcriptions.create(
            model="whisper-1",
            file=("a.wav", wav(noise(60))),
            chunking_strategy={"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 200},
        )
    assert said.text == ""


async def test_the_network_that_finds_speech_is_no_model_to_ask(node, http):
    body = {"model": VOICE_MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    async with http.post(node.url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 404
        assert "part of other models" in (await reply.json())["error"]["message"]
    async with http.get(node.url + "/v1/models") as reply:
        assert VOICE_MODEL not in [model["id"] for model in (await reply.json())["data"]]


@pytest.mark.parametrize(
    ("content", "fields", "status", "says"),
    [
        (None, {}, 400, "file is missing"),
        (b"", {}, 400, "file is empty"),
        (b"\xff" * 100_000, {}, 400, "not audio|no audio"),
        (b"x" * (8 * 2**20 + 1), {}, 413, "more than"),
        (b"x", {"response_format": "xml"}, 400, "response_format: Input should be"),
        (b"x", {"language": "de"}, 400, "language must be en"),
        (b"x", {"timestamp_granularities[]": "word"}, 400, "needs response_format verbose_json"),
        (b"x", {"prompt": "x" * 20_000}, 400, "more than 16384 bytes"),
        (b"x", {"model": "nothing"}, 404, "nothing"),
        (b"x", {"path": "/v1/audio/translations"}, 400, "English"),
        (wav(np.zeros(121 * 16_000, np.int16)), {}, 400, "longer than 120 s"),
    ],
    ids=range(11),
)
async def test_bad_requests_are_refused_by_what_is_wrong(send, content, fields, status, says):
    found, _, body = await send(content, **fields)
    assert found == status, body
    assert re.search(says, body["error"]["message"])


def test_the_command_of_the_documentation_works(node, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "speech.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"```sh\n(curl .*)\n```", page)
    shutil.copyfile(list(SPEECH)[1], tmp_path / "speech.ogg")
    command = command.replace("http://127.0.0.1:8081", node.url)
    done = subprocess.run(shlex.split(command), cwd=tmp_path, capture_output=True, check=True, timeout=60)
    assert "young man" in json.loads(done.stdout)["text"]


def straight(url):
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, default_headers=ON_CPU)


async def test_openai_client_transcribes_and_streams(node):
    content = list(SPEECH)[4].read_bytes()
    async with straight(node.url) as client:
        said = await client.audio.transcriptions.create(model="whisper-1", file=("a.ogg", content))
        assert "amiable himself" in said.text
        verbose = await client.audio.transcriptions.create(
            model="whisper-1",
            file=("a.ogg", content),
            response_format="verbose_json",
            timestamp_granularities=["word"],
        )
        assert [word.word for word in verbose.words][-1].startswith("himself")
        assert verbose.segments is None
        text = await client.audio.transcriptions.create(
            model="whisper-1", file=("a.ogg", content), response_format="text"
        )
        assert text.strip() == said.text
        stream = await client.audio.transcriptions.create(model="whisper-1", file=("a.ogg", content), stream=True)
        events = [event async for event in stream]
    assert [event.type for event in events] == ["transcript.text.delta", "transcript.text.done"]
    assert events[0].delta == events[1].text == said.text


@pytest.mark.parametrize(
    "prompt", ["é" * 8000, "Mr. John Dashwood " * 500, "𝔘" * 4000, " " * 9000], ids=["é", "words", "𝔘", "blanks"]
)
async def test_a_prompt_longer_than_the_decoder_takes_is_cut_and_costs_no_engine(send, node, prompt):
    def engines():
        return [engine["restarts"] for engine in node.health()[1]["models"][0]["engines"]]

    before, file = engines(), next(iter(SPEECH))
    status, _, body = await send(file.read_bytes(), headers=ON_CPU, prompt=prompt)
    assert status == 200, body
    assert engines() == before


def test_an_npu_gives_times_of_words_where_the_model_is_set_to(speech_store):
    """In this process, on the emulated NPU, with the plan that a node makes of the setting."""
    installed = speech_store.get(MODEL)
    target = Target(installed, ModelSettings(name=MODEL), Device.NPU, emulated=True, memory=None)
    assert "word_timestamps" in TRANSCRIBE.plan(TranscribeOptions(), target).lacks
    plan = TRANSCRIBE.plan(TranscribeOptions(word_timestamps=True), target)
    assert "word_timestamps" not in plan.lacks
    runner = TranscribeRunner(
        EngineSpec(MODEL, "transcription", str(installed.path), Device.NPU, "", asdict(plan.options), emulated=True)
    )
    runner.load()
    events = []
    runner.submit(TranscribeJob(1, pcm(next(iter(SPEECH))).tobytes(), time.monotonic() + 600, words=True))
    runner.step(events.append, lambda: None)
    assert "".join(word.text for word in events[-1].words) == events[-1].text
    runner.close()


def test_a_cancelled_window_stops_the_pipeline_at_its_next_token(speech_store):
    """In this process, on the real pipeline: nothing is computed after the command has arrived."""
    path = str(speech_store.get(MODEL).path)
    runner = TranscribeRunner(EngineSpec(MODEL, "transcription", path, Device.CPU, "", {}))
    runner.load()
    samples = pcm(next(iter(SPEECH))).tobytes()
    for job in (1, 2):
        runner.submit(TranscribeJob(job, samples, time.monotonic() + 600))
    events, polls = [], []

    def poll():
        polls.append(len(events))
        if len(polls) == 2:
            runner.cancel(1)
            runner.cancel(2)

    runner.step(events.append, poll)
    # GenAI hands over once more the text that it held back; the whole reading has some thirty tokens.
    assert len(polls) <= 3, "it went on after the second token"
    assert not [event for event in events if isinstance(event, Transcript)]
    assert not runner.has_work, "what waited behind it is gone, too"
    runner.submit(TranscribeJob(3, samples, time.monotonic() + 600))
    runner.step(events.append, lambda: None)
    assert "prudently" in events[-1].text
    runner.close()
