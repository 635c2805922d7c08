"""Writes the three configuration files that openvino-genai reads beside a Whisper model."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.whisper.checkpoints import Tensors, read_checkpoint, read_repository
from worker_node.models.convert.whisper.network import Dimensions, WhisperWeights, build_decoder, build_encoder
from worker_node.models.convert.whisper.vocabulary import (
    Vocabulary,
    read_tiktoken,
    read_tokenizer_json,
    write_tokenizer_models,
)

_SAMPLES_PER_SECOND = 16_000
_SECONDS = 30
# Which heads of the cross-attention follow the audio, as OpenAI published them: (layers, heads, multilingual, encoder
# layers) to a compressed bit map. large-v1 and large-v2 have the same sizes and are left to the default.
_ALIGNMENT_HEADS = {
    (4, 6, False, 4): "ABzY8J1N>@0{>%R00Bk>$p{7v037`oCl~+#00",
    (4, 6, True, 4): "ABzY8bu8Lr0{>%RKn9Fp%m@SkK7Kt=7ytkO",
    (6, 8, False, 6): "ABzY8;40c<0{>%RzzG;p*o+Vo09|#PsxSZm00",
    (6, 8, True, 6): "ABzY8KQ!870{>%RzyTQH3`Q^yNP!>##QT-<FaQ7m",
    (12, 12, False, 12): "ABzY8>?_)10{>%RpeA61k&I|OI3I$65C{;;pbCHh0B{qLQ;+}v00",
    (12, 12, True, 12): "ABzY8DmU6=0{>%Rpa?J`kvJ6qF(V^F86#Xh7JUGMK}P<N0000",
    (24, 16, False, 24): "ABzY8usPae0{>%R7<zz_OvQ{)4kMa0BMw6u5rT}kRKX;$NfYBv00*Hl@qhsU00",
    (24, 16, True, 24): "ABzY8B0Jh+0{>%R7}kK1fFL7w6%<-Pf*t^=N)Qr&0RR9",
    (4, 20, True, 32): "ABzY8j^C+e0{>%RARaKHP%t(lGR*)0g!tONPyhe`",
}
_LARGE_V3 = "ABzY8gWO1E0{>%R7(9S+Kn!D~%ngiGaR?*L!iJG9p-nab0JQ=-{D1-g00"
_GZIP_OR_ZLIB = 47


def write_configuration(sizes: Dimensions, vocabulary: Vocabulary, target: Path, *, published: dict[str, Any]) -> None:
    """Write config.json, preprocessor_config.json and generation_config.json.

    `published` is the model's own generation_config.json; its entries win. A checkpoint of OpenAI's has none ({}).
    """
    generation = {
        "begin_suppress_tokens": vocabulary.suppressed_at_begin(),
        "suppress_tokens": vocabulary.suppressed(),
        "decoder_start_token_id": vocabulary.id_of("<|startoftranscript|>"),
        "eos_token_id": vocabulary.end,
        "pad_token_id": vocabulary.end,
        "no_timestamps_token_id": vocabulary.id_of("<|notimestamps|>"),
        "prev_sot_token_id": vocabulary.id_of("<|startofprev|>"),
        "max_initial_timestamp_index": 50,
        "max_length": sizes.n_text_ctx,
        "is_multilingual": sizes.multilingual,
        "alignment_heads": alignment_heads(sizes),
    }
    if sizes.multilingual:
        generation["lang_to_id"] = vocabulary.languages()
        generation["task_to_id"] = {task: vocabulary.id_of(f"<|{task}|>") for task in ("transcribe", "translate")}
    known = {key: value for key, value in published.items() if value is not None}
    _write(target / "generation_config.json", generation | known)
    _write(
        target / "config.json",
        {
            "model_type": "whisper",
            "architectures": ["WhisperForConditionalGeneration"],
            "max_source_positions": sizes.n_audio_ctx,
            "max_target_positions": sizes.n_text_ctx,
            "num_mel_bins": sizes.n_mels,
            "vocab_size": sizes.n_vocab,
            "decoder_layers": sizes.n_text_layer,
            "decoder_attention_heads": sizes.n_text_head,
            "d_model": sizes.n_text_state,
        },
    )
    _write(
        target / "preprocessor_config.json",
        {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": sizes.n_mels,
            "sampling_rate": _SAMPLES_PER_SECOND,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": _SECONDS,
            "n_samples": _SECONDS * _SAMPLES_PER_SECOND,
            "nb_max_frames": 2 * sizes.n_audio_ctx,
        },
    )


def alignment_heads(sizes: Dimensions) -> list[list[int]]:
    """[layer, head] pairs of the cross-attention that word timestamps are read from.

    Where none are published: all heads of the upper half of the layers, as OpenAI's own default is.
    """
    shape = (sizes.n_text_layer, sizes.n_text_head)
    packed = _ALIGNMENT_HEADS.get((*shape, sizes.multilingual, sizes.n_audio_layer))
    if packed is None and sizes.n_mels == 128 and shape == (32, 20):
        packed = _LARGE_V3
    if packed is None:
        return [[layer, head] for layer in range(shape[0] // 2, shape[0]) for head in range(shape[1])]
    bits = zlib.decompress(base64.b85decode(packed), _GZIP_OR_ZLIB)
    return [[int(i) for i in place] for place in np.argwhere(np.frombuffer(bits, dtype=bool).reshape(shape))]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# Writes the directory that openvino-genai's WhisperPipeline loads, from either form of published weights.

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
