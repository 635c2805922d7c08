"""What `chunking_strategy` and `vad_filter` mean in a form, and what a node without the network says to them."""

import math

import pytest
from multidict import MultiDict

from tests.support.published import install
from tests.support.services import manager_of
from worker_node.core.errors import BadRequest, ConfigurationError, UnsupportedParameter
from worker_node.models.catalog import Catalog
from worker_node.models.store import ModelStore
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.transcribe.building import TRANSCRIBE
from worker_node.tasks.transcribe.http import SpeechForm
from worker_node.tasks.transcribe.service import VoiceChoice, find_voice
from worker_node.tasks.transcribe.task import AudioOptions


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
        ({"chunking_strategy": '{"type":"server_vad","silence_duration_ms":1e9}'}, "equal to 60000"),
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
    with pytest.raises(ConfigurationError, match=f"npu-node pull silero-vad --model-store {tmp_path}"):
        TRANSCRIBE.open(None, wanted, NodeSettings(model_store=tmp_path))
