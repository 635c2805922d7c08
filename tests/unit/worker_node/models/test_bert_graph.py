"""The graph computes what the BERT paper's formulas do, in any shape, and refuses what it does not know."""

import json
import math

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op
from safetensors.numpy import save_file

from tests.support.numpy_bert import hidden_states
from worker_node.core.errors import ConfigurationError, ConversionFailed
from worker_node.models.convert.embedding import Pooling, build_encoder, pool, read_encoder_config, read_sentence_config
from worker_node.models.convert.encoder import read_tensors
from worker_node.models.directory import peek_config

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def encode(config, tensors, ids, pooling, *, normalise):
    """One text without padding, in float64, straight from the formulas."""
    heads, epsilon = config["num_attention_heads"], config["layer_norm_eps"]
    gelu = ACTIVATIONS[config["hidden_act"]]
    x = hidden_states(tensors, heads, ids, [0] * len(ids), epsilon=epsilon, gelu=gelu)
    vector = x.mean(0) if pooling == "mean_tokens" else x[0]
    return vector / np.linalg.norm(vector) if normalise else vector


def build(directory):
    return build_encoder(read_encoder_config(directory), read_sentence_config(directory), read_tensors(directory))


def batch(texts, length):
    ids, mask = np.zeros((len(texts), length), dtype=np.int64), np.zeros((len(texts), length), dtype=np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


TEXTS = ([2, 5, 9, 30, 3], [2, 3], [2, *range(4, 20), 3])


@pytest.mark.parametrize(
    ("pooling", "normalise", "activation"), [("mean_tokens", True, "gelu"), ("cls_token", False, "gelu_new")]
)
def test_vectors_are_those_of_the_formulas(make_bert, pooling, normalise, activation):
    directory, tensors = make_bert(pooling=pooling, normalise=normalise, hidden_act=activation)
    config = json.loads((directory / "config.json").read_text())
    compiled = ov.compile_model(build(directory), "CPU", F32)
    vectors = compiled(batch(TEXTS, 24))["embedding"]
    for vector, text in zip(vectors, TEXTS, strict=True):
        np.testing.assert_allclose(vector, encode(config, tensors, text, pooling, normalise=normalise), atol=2e-5)


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_a_row_of_padding_only_is_finite(make_bert, pooling):
    compiled = ov.compile_model(build(make_bert(pooling=pooling)[0]), "CPU", F32)
    feed = batch([[], [2, 5, 3]], 8)
    vectors = compiled(feed)["embedding"]
    assert np.isfinite(vectors).all()
    assert pooling == "cls_token" or not vectors[0].any()


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("config.json", {"model_type": "roberta"}, "model_type"),
        ("config.json", {"architectures": ["BertForQuestionAnswering"]}, "architectures"),
        ("config.json", {"hidden_act": "silu"}, "hidden_act"),
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("config.json", {"is_decoder": True}, "is_decoder"),
        ("config.json", {"add_cross_attention": True}, "add_cross_attention"),
        ("config.json", {"num_attention_heads": 5}, "num_attention_heads"),
        ("modules.json", [{"path": "", "type": "x.Transformer"}], "Transformer"),
        ("modules.json", {"not": "a list"}, r"modules\.json"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "mean_tokens"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name"),
    ],
)
def test_options_that_need_another_graph_are_refused_by_name(make_bert, file, content, complaint):
    directory, _ = make_bert()
    if file == "config.json":
        content = json.loads((directory / file).read_text()) | content
    (directory / file).write_text(json.dumps(content))
    with pytest.raises((ConversionFailed, ConfigurationError), match=complaint):
        build(directory)


@pytest.mark.parametrize("lowers", [True, False])
def test_do_lower_case_is_judged_by_what_the_tokenizer_does(make_bert, lowers):
    directory, _ = make_bert()
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = lowers
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 8, "do_lower_case": true}')
    if lowers:
        assert read_sentence_config(directory).max_tokens == 8
    else:
        with pytest.raises(ConversionFailed, match=r"do_lower_case is set and tokenizer\.json keeps upper case"):
            read_sentence_config(directory)


def renamed(tensors, prefix, names):
    for former, name in names.items():
        tensors = {key.replace(former, name): tensor for key, tensor in tensors.items()}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def in_shards(tensors, directory):
    (directory / "model.safetensors").unlink()
    for shard, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        save_file({name: tensors[name] for name in names}, directory / f"model-0000{shard}-of-00002.safetensors")


@pytest.mark.parametrize("form", ["prefix", "gamma", "shards", "config"])
def test_checkpoints_in_every_published_form_give_the_same_vectors(make_bert, form):
    directory, tensors = make_bert()
    expected = ov.compile_model(build(directory), "CPU", F32)(batch(TEXTS, 24))["embedding"]
    config = json.loads((directory / "config.json").read_text())
    if form == "prefix":
        heads = {"cls.predictions.transform.dense.weight": np.ones((4, 4), np.float32)}
        save_file(renamed(tensors, "bert.", {}) | heads, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config | {"architectures": ["BertForPreTraining"]}))
    elif form == "gamma":
        names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        save_file(renamed(tensors, "", names), directory / "model.safetensors")
    elif form == "shards":
        in_shards(tensors, directory)
    else:
        kept = {name: config[name] for name in config.keys() - {"hidden_act", "layer_norm_eps", "architectures"}}
        (directory / "config.json").write_text(json.dumps(kept), encoding="utf-8-sig")
        assert peek_config(directory / "config.json") == kept
    vectors = ov.compile_model(build(directory), "CPU", F32)(batch(TEXTS, 24))["embedding"]
    np.testing.assert_array_equal(vectors, expected)


def test_weights_that_are_missing_misshapen_or_left_over_are_refused_by_name(make_bert):
    directory, tensors = make_bert()
    bert, sentence = read_encoder_config(directory), read_sentence_config(directory)
    name = "encoder.layer.1.output.dense.weight"
    for broken in (
        {key: value for key, value in tensors.items() if key != name},
        {**tensors, name: tensors[name].T},
        {**tensors, name + "_two": tensors[name]},
    ):
        with pytest.raises(ConversionFailed, match=name):
            build_encoder(bert, sentence, broken)
    in_shards(tensors, directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConversionFailed, match=r"model\.safetensors is missing, or one of its shards"):
        read_tensors(directory)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
def test_every_published_float_type_is_read(tmp_path, dtype):
    values = np.array([[1.5, -2.0], [0.25, 3.0]], dtype=np.float32)
    raw = {
        "F32": values.tobytes(),
        "F16": values.astype(np.float16).tobytes(),
        "F64": values.astype(np.float64).tobytes(),
        "BF16": (values.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
    }[dtype]
    header = json.dumps({"w": {"dtype": dtype, "shape": [2, 2], "data_offsets": [0, len(raw)]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw)
    np.testing.assert_array_equal(read_tensors(tmp_path)["w"], values)


# In bf16, 256 and 1 is 256.
BF16 = {"INFERENCE_PRECISION_HINT": "bf16"}
TOKENS = [0, 1, 255, 256, 257, 258, 301, 511, 600]


def pooled(pooling, hidden, mask):
    """What a CPU with bf16 makes of token vectors, f32 [batch, length, size]."""
    parameters = [op.parameter([-1, -1, -1], np.float32), op.parameter([-1, -1], np.int64)]
    graph = ov.Model([op.result(pool(*parameters, pooling, normalise=False))], parameters, "pooling")
    return ov.compile_model(graph, "CPU", BF16)([hidden, mask])[0]


@pytest.mark.parametrize("padded", ["at the end", "in front"])
def test_the_last_token_of_a_long_text_is_found_in_bf16(padded):
    longest = max(TOKENS)
    mask = np.array([[1] * tokens + [0] * (longest - tokens) for tokens in TOKENS], np.int64)
    mask = mask if padded == "at the end" else mask[:, ::-1].copy()
    # Numbers that bf16 has exactly; no two neighbours are alike.
    hidden = np.tile(np.arange(longest, dtype=np.float32)[None, :, None] % 251 + 1, (len(TOKENS), 1, 2))
    ends = [tokens - 1 if padded == "at the end" else longest - 1 for tokens in TOKENS]
    wanted = [row[end] if tokens else [0, 0] for row, end, tokens in zip(hidden, ends, TOKENS, strict=True)]
    np.testing.assert_array_equal(pooled(Pooling.LAST, hidden, mask), wanted)
