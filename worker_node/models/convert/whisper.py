"""Writes OpenAI's English-only Whisper checkpoints as openvino-genai loads them, without torch.

Other Whisper models are published in OpenVINO form, and taken as they are (`tasks/transcribe/files.py`).
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino_tokenizers.constants import UTF8ReplaceMode
from openvino_tokenizers.tokenizer_pipeline import (
    BPETokenizationStep,
    CombineSegmentsStep,
    FuseStep,
    PaddingStep,
    RegexSplitStep,
    SpecialToken,
    SpecialTokensSplit,
    TokenizerPipeline,
    TruncationStep,
    UTF8ValidateStep,
    VocabDecoderStep,
)
from openvino_tokenizers.tokenizer_pipeline import (
    Sequence as Steps,
)
from openvino_tokenizers.utils import change_inputs_type, change_outputs_type

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.encoder import Weights
from worker_node.models.convert.whisper_network import UNUSED_TENSORS, Dimensions, build_decoder, build_encoder

ENCODER_FILE, DECODER_FILE = "openvino_encoder_model.xml", "openvino_decoder_model.xml"
_VOCABULARY_FILE = "gpt2.tiktoken"
_SAMPLES_PER_SECOND = 16_000
_SECONDS = 30


def write_whisper(source: Path, target: Path, stage: Callable[[str], None]) -> Dimensions:
    """Convert what `source` holds: one `*.pt` with `gpt2.tiktoken`. The weights are kept in f16.

    Raises ConversionFailed when a file is missing or damaged, or the model is a multilingual one.
    """
    stage("reading the weights")
    checkpoint = min(source.glob("*.pt"))
    sizes, tensors = read_checkpoint(checkpoint)
    vocabulary = read_tiktoken(source / _VOCABULARY_FILE)
    if len(vocabulary.tokens) != sizes.n_vocab:
        raise ConversionFailed(
            f"{checkpoint}: has {sizes.n_vocab} tokens, an English-only Whisper checkpoint {len(vocabulary.tokens)}; "
            "multilingual models are published in OpenVINO form: npu-node pull OpenVINO/whisper-small-fp16-ov"
        )
    stage("building encoder and decoder")
    weights = Weights(tensors, UNUSED_TENSORS)
    encoder, decoder = build_encoder(sizes, weights), build_decoder(sizes, weights)
    weights.expect_all_used()
    ov.save_model(encoder, target / ENCODER_FILE, compress_to_fp16=True)
    ov.save_model(decoder, target / DECODER_FILE, compress_to_fp16=True)
    stage("writing the tokenizer")
    write_tokenizer_models(vocabulary, target)
    write_configuration(sizes, vocabulary, target)
    return sizes


# What OpenAI's decoder never lets an English-only model say (`suppress_tokens="-1"`): annotations of what is not
# speech, and control tokens. As in the generation_config.json of these models' repositories.
_SUPPRESSED = (
    *(1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 357, 366, 438, 532, 685),
    *(705, 796, 930, 1058, 1220, 1267, 1279, 1303, 1343, 1377, 1391, 1635, 1782, 1875, 2162, 2361, 2488, 3467, 4008),
    *(4211, 4600, 4808, 5299, 5855, 6329, 7203, 9609, 9959, 10563, 10786, 11420, 11709, 11907, 13163, 13697, 13700),
    *(14808, 15306, 16410, 16791, 17992, 19203, 19510, 20724, 22305, 22935, 27007, 30109, 30420, 33409, 34949, 40283),
    *(40493, 40549, 47282, 49146, 50257, 50357, 50358, 50359, 50360, 50361),
)
_BLANK = 220
# Which heads of the cross-attention follow the audio, as OpenAI published them: LAYER.HEAD, by the
# numbers of layers and heads.
_ALIGNMENT_HEADS = {
    (4, 6): "1.0 2.0 2.5 3.0 3.1 3.2 3.3 3.4",
    (6, 8): "3.3 4.7 5.1 5.5 5.7",
    (12, 12): "6.6 7.0 7.3 7.8 8.2 8.5 8.7 9.0 9.4 9.8 9.10 10.0 10.1 10.2 10.3 10.6 10.11 11.2 11.4",
    (24, 16): "11.4 14.1 14.12 14.14 15.4 16.0 16.4 16.9 17.12 17.14 18.7 18.10 18.15 20.0 20.3 20.9 20.14 21.12",
}


def write_configuration(sizes: Dimensions, vocabulary: Vocabulary, target: Path) -> None:
    """Write config.json, preprocessor_config.json and generation_config.json."""
    generation = {
        # No transcript begins with a blank, or ends at once.
        "begin_suppress_tokens": [_BLANK, vocabulary.end],
        "suppress_tokens": list(_SUPPRESSED),
        "decoder_start_token_id": vocabulary.special["<|startoftranscript|>"],
        "eos_token_id": vocabulary.end,
        "pad_token_id": vocabulary.end,
        "no_timestamps_token_id": vocabulary.special["<|notimestamps|>"],
        "prev_sot_token_id": vocabulary.special["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "max_length": sizes.n_text_ctx,
        "is_multilingual": False,
        "alignment_heads": alignment_heads(sizes),
    }
    _write(target / "generation_config.json", generation)
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
    layers, heads = sizes.n_text_layer, sizes.n_text_head
    known = _ALIGNMENT_HEADS.get((layers, heads))
    if known is not None:
        return [[int(number) for number in head.split(".")] for head in known.split()]
    return [[layer, head] for layer in range(layers // 2, layers) for head in range(heads)]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


Tensors = dict[str, NDArray[np.float32]]

_STORAGES = {"FloatStorage": np.dtype("<f4"), "HalfStorage": np.dtype("<f2")}
# No Whisper checkpoint is larger than 3.1 GB; a zip entry that claims more is not read.
_LARGEST_ENTRY = 4 << 30


def read_checkpoint(path: Path) -> tuple[Dimensions, Tensors]:
    """The network's sizes and its tensors as float32, by OpenAI's names (`decoder.blocks.0.attn.query.weight`).

    Raises ConversionFailed when the file is damaged, refers to code, or is not a Whisper checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entry = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if entry is None:
                raise ConversionFailed(f"{path}: the archive has no data.pkl; a PyTorch checkpoint has one")
            content = _Unpickler(archive, entry.removesuffix("data.pkl")).load()
            sizes, state = content["dims"], content["model_state_dict"]
            dimensions = Dimensions(**{field.name: int(sizes[field.name]) for field in fields(Dimensions)})
            return dimensions, {str(name): np.ascontiguousarray(x, dtype=np.float32) for name, x in state.items()}
    except ConversionFailed:
        raise
    except (OSError, zipfile.BadZipFile, pickle.UnpicklingError, KeyError, TypeError, ValueError, EOFError) as error:
        raise ConversionFailed(f"{path}: not a Whisper checkpoint of OpenAI's form ({error})") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(io.BytesIO(_entry(archive, f"{prefix}data.pkl")))
        self._archive, self._prefix = archive, prefix

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which a Whisper checkpoint does not need")

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        kind, dtype, key, _device, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError("it has a reference that is not a tensor storage")
        return np.frombuffer(_entry(self._archive, f"{self._prefix}data/{key}"), dtype=dtype, count=count)


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.file_size > _LARGEST_ENTRY:
        raise ConversionFailed(f"entry {name} claims {info.file_size} bytes; no Whisper tensor is that large")
    return archive.read(info)


def _rebuild_tensor(
    storage: NDArray[Any], offset: int, size: Sequence[int], stride: Sequence[int], *_: object
) -> NDArray[Any]:
    if offset < 0 or any(n < 0 for n in (*size, *stride)) or len(size) != len(stride):
        raise ValueError("a tensor has a negative extent")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if size else offset
    if all(size) and last >= len(storage):
        raise ValueError("a tensor reaches beyond its storage")
    strides = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], shape=tuple(size), strides=strides, writeable=False)


# In the order of their tokens, which follow <|startoftranscript|>; no English-only model writes one.
_LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg "
    "lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so "
    "af oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su"
)
_TIMESTAMPS = 1501


@dataclass(frozen=True)
class Vocabulary:
    """`tokens` by id, special ones included; `merges` in the order of their ranks; `special` by their text."""

    tokens: list[bytes]
    merges: list[tuple[bytes, bytes]]
    special: dict[str, int]

    @property
    def end(self) -> int:
        """The token that ends a transcript."""
        return self.special[_END]


def read_tiktoken(path: Path) -> Vocabulary:
    """Read `gpt2.tiktoken` as openai-whisper ships it. Raises ConversionFailed when the file is damaged."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError, binascii.Error) as error:
        raise ConversionFailed(f"{path}: not a readable list of tokens ({error})") from error
    tokens = sorted(ranks, key=ranks.__getitem__)
    if [ranks[token] for token in tokens] != list(range(len(tokens))):
        raise ConversionFailed(f"{path}: the ranks of its tokens have gaps")
    names = [
        "endoftext",
        "startoftranscript",
        *_LANGUAGES.split(),
        "translate",
        "transcribe",
        "startoflm",
        "startofprev",
        "nospeech",
        "notimestamps",
        *(f"{step * 0.02:.2f}" for step in range(_TIMESTAMPS)),
    ]
    special = {f"<|{name}|>": len(tokens) + place for place, name in enumerate(names)}
    merges = [_split(ranks, token) for token in tokens if len(token) > 1]
    return Vocabulary([*tokens, *(name.encode() for name in special)], merges, special)


def _split(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """The two tokens that are merged into this one: byte-pair encoding stopped before its own rank."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], limit))
        if ranks.get(parts[best] + parts[best + 1], limit) >= limit:
            raise ConversionFailed(f"token {token!r} is not the merge of two others")
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


_LONGEST = 1024
_END = "<|endoftext|>"


def write_tokenizer_models(vocabulary: Vocabulary, target: Path) -> None:
    """Write `openvino_tokenizer.xml` and `openvino_detokenizer.xml`, which skips special tokens."""
    special = [SpecialToken(text) for text in vocabulary.special]
    pipeline = TokenizerPipeline()
    pipeline.add_steps(
        [
            SpecialTokensSplit(special),
            RegexSplitStep.byte_level_splitter(),
            BPETokenizationStep(vocab=list(vocabulary.tokens), merges=list(vocabulary.merges)),
            TruncationStep(max_length=_LONGEST),
            CombineSegmentsStep(inputs=[Steps()]),
            PaddingStep(_END, _token_id=vocabulary.end),
            VocabDecoderStep(vocab=list(vocabulary.tokens), skip_tokens=sorted(vocabulary.special.values())),
            FuseStep(),
            UTF8ValidateStep(mode=UTF8ReplaceMode.REPLACE),
        ]
    )
    tokenizer, detokenizer = pipeline.get_tokenizer_ov_subgraph(), pipeline.get_detokenizer_ov_subgraph()
    tokenizer.outputs[0].add_names({"input_ids"})
    tokenizer.outputs[1].add_names({"attention_mask"})
    # GenAI reads token ids as i64; left as i32 it raises ParameterMismatch.
    tokenizer = change_outputs_type(tokenizer, ov.Type.i64)
    detokenizer = change_inputs_type(detokenizer, ov.Type.i64)
    for model in (tokenizer, detokenizer):
        model.set_rt_info(vocabulary.end, "eos_token_id")
        model.set_rt_info(vocabulary.end, "pad_token_id")
    ov.save_model(tokenizer, target / "openvino_tokenizer.xml")
    ov.save_model(detokenizer, target / "openvino_detokenizer.xml")
