"""Writes the directory that openvino-genai's WhisperPipeline loads, from either form of published weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openvino as ov

from worker_node.core.errors import ConversionFailed
from worker_node.models.conversion.whisper.checkpoint import Tensors, read_checkpoint
from worker_node.models.conversion.whisper.configuration import write_configuration
from worker_node.models.conversion.whisper.decoder import build_decoder
from worker_node.models.conversion.whisper.dimensions import Dimensions
from worker_node.models.conversion.whisper.encoder import build_encoder
from worker_node.models.conversion.whisper.parts import WhisperWeights
from worker_node.models.conversion.whisper.safetensors_names import read_repository
from worker_node.models.conversion.whisper.tokenizer_models import write_tokenizer_models
from worker_node.models.conversion.whisper.vocabulary import Vocabulary, read_tiktoken, read_tokenizer_json

ENCODER_FILE, DECODER_FILE = "openvino_encoder_model.xml", "openvino_decoder_model.xml"


def write_whisper(source: Path, target: Path, stage: Callable[[str], None]) -> Dimensions:
    """Convert what `source` holds: one `*.pt` with its `*.tiktoken`, or config.json, model.safetensors, tokenizer.json.

    The weights are kept in f16. Raises ConversionFailed when a file is missing or damaged.
    """
    stage("reading the weights")
    checkpoint = next(iter(sorted(source.glob("*.pt"))), None)
    if checkpoint is None:
        sizes, tensors = read_repository(source)
        vocabulary = read_tokenizer_json(source / "tokenizer.json")
    else:
        sizes, tensors = read_checkpoint(checkpoint)
        vocabulary = _tiktoken(source, sizes)
    if len(vocabulary.tokens) != sizes.n_vocab:
        raise ConversionFailed(
            f"{source}: the tokenizer has {len(vocabulary.tokens)} tokens, the network {sizes.n_vocab}; "
            "take both from the same model"
        )
    stage("building encoder and decoder")
    _write_graphs(sizes, tensors, target)
    stage("writing the tokenizer")
    write_tokenizer_models(vocabulary, target)
    write_configuration(sizes, vocabulary, target, published=_published(source))
    return sizes


def _tiktoken(source: Path, sizes: Dimensions) -> Vocabulary:
    name = "multilingual.tiktoken" if sizes.multilingual else "gpt2.tiktoken"
    # An English-only vocabulary has language tokens too, which no transcript uses.
    return read_tiktoken(source / name, sizes.languages if sizes.multilingual else 99)


def _write_graphs(sizes: Dimensions, tensors: Tensors, target: Path) -> None:
    weights = WhisperWeights(tensors)
    encoder, decoder = build_encoder(sizes, weights), build_decoder(sizes, weights)
    weights.expect_all_used()
    ov.save_model(encoder, target / ENCODER_FILE, compress_to_fp16=True)
    ov.save_model(decoder, target / DECODER_FILE, compress_to_fp16=True)


def _published(source: Path) -> dict[str, Any]:
    path = source / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConversionFailed(f"{path}: not readable ({error})") from error
