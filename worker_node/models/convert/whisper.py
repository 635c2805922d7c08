"""Writes Whisper models as openvino-genai loads them, from OpenAI's checkpoints or repositories, without torch."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import re
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from worker_node.core.errors import ConversionFailed
from worker_node.models.convert.encoder import Weights, read_json, read_tensors
from worker_node.models.convert.whisper_network import UNUSED_TENSORS, Dimensions, build_decoder, build_encoder

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
    weights = Weights(tensors, UNUSED_TENSORS)
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


_PARTS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
_PLAIN = {
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "encoder.layer_norm.weight": "encoder.ln_post.weight",
    "encoder.layer_norm.bias": "encoder.ln_post.bias",
    "decoder.embed_tokens.weight": "decoder.token_embedding.weight",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.layer_norm.weight": "decoder.ln.weight",
    "decoder.layer_norm.bias": "decoder.ln.bias",
}
_IN_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(\w+)(?:\.(\w+))?\.(weight|bias)")
_NORMS = {
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
}
_ATTENTIONS = {"self_attn": "attn", "encoder_attn": "cross_attn"}


class _Config(msgspec.Struct, frozen=True):
    num_mel_bins: int
    max_source_positions: int
    max_target_positions: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    decoder_layers: int
    decoder_attention_heads: int
    vocab_size: int
    activation_function: str = "gelu"


def read_repository(source: Path) -> tuple[Dimensions, Tensors]:
    """Sizes from config.json and tensors from model.safetensors, by the names of OpenAI's checkpoints.

    Raises ConversionFailed when a file is missing or damaged, or when the network is of another form.
    """
    config = read_json(source / "config.json", _Config)
    if config.activation_function != "gelu":
        raise ConversionFailed(
            f"{source / 'config.json'}: activation {config.activation_function} is not supported; Whisper uses gelu"
        )
    sizes = Dimensions(
        n_mels=config.num_mel_bins,
        n_audio_ctx=config.max_source_positions,
        n_audio_state=config.d_model,
        n_audio_head=config.encoder_attention_heads,
        n_audio_layer=config.encoder_layers,
        n_vocab=config.vocab_size,
        n_text_ctx=config.max_target_positions,
        n_text_state=config.d_model,
        n_text_head=config.decoder_attention_heads,
        n_text_layer=config.decoder_layers,
    )
    tensors = read_tensors(source / "model.safetensors")
    # The output projection is the token embedding again; some exports write it out.
    return sizes, {openai_name(name): x for name, x in tensors.items() if name != "proj_out.weight"}


def openai_name(name: str) -> str:
    """`model.decoder.layers.0.encoder_attn.q_proj.weight` to `decoder.blocks.0.cross_attn.query.weight`.

    Other names are returned as they are, without `model.`; the builder rejects those that it does not know.
    """
    name = name.removeprefix("model.")
    if name in _PLAIN:
        return _PLAIN[name]
    found = _IN_LAYER.fullmatch(name)
    if found is None:
        return name
    side, layer, unit, part, kind = found.groups()
    if part is None:
        return f"{side}.blocks.{layer}.{_NORMS.get(unit, unit)}.{kind}"
    return f"{side}.blocks.{layer}.{_ATTENTIONS.get(unit, unit)}.{_PARTS.get(part, part)}.{kind}"


# In the order of their tokens, which follow <|startoftranscript|>.
_LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg "
    "lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so "
    "af oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
)
LANGUAGES = tuple(_LANGUAGES.split())

_TIMESTAMPS = 1501
_SYMBOLS = [
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *("<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))", "[[", "]]", "{{", "}}"),
    *("♪♪", "♪♪♪"),
]
_NOTES = frozenset("♩♪♫♬♭♮♯")


@dataclass(frozen=True)
class Vocabulary:
    """`tokens` by id, special ones included; `merges` in the order of their ranks; `special` by their text."""

    tokens: list[bytes]
    merges: list[tuple[bytes, bytes]]
    special: dict[str, int]

    def id_of(self, text: str) -> int:
        """The id of a special token; raises ConversionFailed when there is none."""
        try:
            return self.special[text]
        except KeyError as error:
            raise ConversionFailed(f"the tokenizer has no token {text}; a Whisper tokenizer has") from error

    @cached_property
    def end(self) -> int:
        """The token that ends a transcript."""
        return self.id_of("<|endoftext|>")

    @cached_property
    def no_speech(self) -> int:
        """The token that says that nobody speaks; HF's files call it <|nocaptions|>."""
        found = self.special.get("<|nospeech|>")
        return self.id_of("<|nocaptions|>") if found is None else found

    def languages(self) -> dict[str, int]:
        """Language tokens (`<|en|>`) with their ids."""
        names = (f"<|{language}|>" for language in LANGUAGES)
        return {name: self.special[name] for name in names if name in self.special}

    def suppressed(self) -> list[int]:
        """Tokens that no transcript contains: annotations of what is not speech, and control tokens.

        The set of OpenAI's decoder (`suppress_tokens="-1"`), which the checkpoint does not carry.
        """
        encoder = self._encoder()
        found = {encoder.encode(" -").ids[0], encoder.encode(" '").ids[0]}
        for symbol in (*_SYMBOLS, *_NOTES):
            for text in (symbol, f" {symbol}"):
                ids = encoder.encode(text).ids
                if len(ids) == 1 or symbol in _NOTES:
                    found.add(ids[0])
        control = ("startoftranscript", "translate", "transcribe", "startoflm", "startofprev")
        return sorted(found | {self.id_of(f"<|{name}|>") for name in control} | {self.no_speech})

    def suppressed_at_begin(self) -> list[int]:
        """Tokens that no transcript begins with: a blank, and its end."""
        return [*self._encoder().encode(" ").ids[:1], self.end]

    def _encoder(self) -> Tokenizer:
        as_text = _bytes_as_text()
        spelled = {
            bytes_to_text(token, as_text): i for i, token in enumerate(self.tokens) if i not in self._special_ids
        }
        merges = [(bytes_to_text(left, as_text), bytes_to_text(right, as_text)) for left, right in self.merges]
        tokenizer = Tokenizer(models.BPE(vocab=spelled, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special.values())


def read_tiktoken(path: Path, languages: int) -> Vocabulary:
    """Read `gpt2.tiktoken` or `multilingual.tiktoken` as openai-whisper ships them; `languages` says how many tokens.

    Raises ConversionFailed when the file is damaged.
    """
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
        *LANGUAGES[:languages],
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


def read_tokenizer_json(path: Path) -> Vocabulary:
    """Read the `tokenizer.json` of a Hugging Face repository. Raises ConversionFailed when it is none of Whisper's."""
    import json  # noqa: PLC0415

    try:
        content = json.loads(path.read_bytes())
        model, added = content["model"], content["added_tokens"]
        from_text = {character: byte for byte, character in _bytes_as_text().items()}
        spelled: dict[str, int] = model["vocab"]
        special = {str(token["content"]): int(token["id"]) for token in added}
        size = max((*spelled.values(), *special.values())) + 1
        tokens = [b""] * size
        for text, place in spelled.items():
            tokens[place] = text.encode() if text in special else bytes(from_text[c] for c in text)
        for text, place in special.items():
            tokens[place] = text.encode()
        pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        merges = [(bytes(from_text[c] for c in left), bytes(from_text[c] for c in right)) for left, right in pairs]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionFailed(f"{path}: not a readable tokenizer of the Whisper family ({error!r})") from error
    return Vocabulary(tokens, merges, special)


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


def bytes_to_text(token: bytes, table: dict[int, str]) -> str:
    """A byte string spelled as byte-level tokenizers spell it."""
    return "".join(table[byte] for byte in token)


def _bytes_as_text() -> dict[int, str]:
    """GPT-2's spelling of bytes as printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


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
