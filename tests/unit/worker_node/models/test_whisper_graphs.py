"""The converted encoder and decoder compute what the same network computes in numpy."""

import numpy as np
import openvino as ov
import pytest

from tests.unit.worker_node.models import tiny_whisper
from worker_node.models.convert.encoder import Weights
from worker_node.models.convert.whisper import UNUSED_TENSORS, Dimensions, build_decoder, build_encoder

SIZES = Dimensions(**tiny_whisper.SIZES)
EXACT = {"INFERENCE_PRECISION_HINT": "f32"}


@pytest.fixture(scope="module")
def tensors():
    return tiny_whisper.tensors()


@pytest.fixture(scope="module")
def audio(tensors):
    mel = np.random.default_rng(1).normal(size=(SIZES.n_mels, 2 * SIZES.n_audio_ctx)).astype(np.float32)
    return mel, tiny_whisper.encode(tensors, mel)


@pytest.fixture(scope="module")
def decoder(tensors):
    return ov.compile_model(build_decoder(SIZES, Weights(tensors, UNUSED_TENSORS)), "CPU", EXACT)


def test_the_encoder_gives_the_hidden_states_of_the_network(tensors, audio):
    mel, expected = audio
    compiled = ov.compile_model(build_encoder(SIZES, Weights(tensors, UNUSED_TENSORS)), "CPU", EXACT)
    assert np.allclose(compiled({"input_features": mel[None]})["last_hidden_state"][0], expected, atol=1e-4)


def test_the_decoder_gives_the_logits_of_the_network_token_by_token(tensors, audio, decoder):
    ids = [3, 17, 5, 31, 8]
    expected = tiny_whisper.decode(tensors, audio[1], ids)
    request = decoder.create_infer_request()
    rows = [_step(request, audio[1], part)[0] for part in (ids[:2], ids[2:3], ids[3:])]
    assert np.allclose(np.concatenate(rows), expected, atol=1e-3)


def test_a_reset_decoder_hears_the_next_audio_and_not_the_last(tensors, audio, decoder):
    ids, other = [3, 17], tiny_whisper.encode(tensors, -audio[0])
    request = decoder.create_infer_request()
    _step(request, audio[1], ids)
    request.reset_state()
    assert np.allclose(_step(request, other, ids)[0], tiny_whisper.decode(tensors, other, ids), atol=1e-3)


def _step(request, audio, ids):
    batch = np.array([ids], np.int64)
    inputs = {"encoder_hidden_states": audio[None], "input_ids": batch, "beam_idx": np.zeros(1, np.int32)}
    return request.infer(inputs)["logits"].copy()
