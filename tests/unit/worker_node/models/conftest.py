"""Tiny models with random weights, in the forms in which models are published: converted in seconds."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from worker_node.models.store import STORE_VARIABLE

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *"abcdefghijklmnopqrstuvwxyz",
    *"0123456789",
    ".",
    ",",
    "the",
    "cat",
    "##s",
]

BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": len(WORDS),
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
}


def bert_tensors(config, seed):
    """Random weights of a BertModel, by the names that Hugging Face gives them."""
    random = np.random.default_rng(seed)
    size, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], size),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], size),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], size),
        "embeddings.LayerNorm.weight": (size,),
        "embeddings.LayerNorm.bias": (size,),
        "pooler.dense.weight": (size, size),
        "pooler.dense.bias": (size,),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            shapes[f"{name}.attention.self.{part}.weight"] = (size, size)
            shapes[f"{name}.attention.self.{part}.bias"] = (size,)
        for part, rows, columns in (
            ("attention.output", size, size),
            ("intermediate", inner, size),
            ("output", size, inner),
        ):
            shapes[f"{name}.{part}.dense.weight"] = (rows, columns)
            shapes[f"{name}.{part}.dense.bias"] = (rows,)
        for part in ("attention.output", "output"):
            shapes[f"{name}.{part}.LayerNorm.weight"] = (size,)
            shapes[f"{name}.{part}.LayerNorm.bias"] = (size,)
    return {name: (random.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def wordpiece_tokenizer():
    """A tokenizer that truncates and pads in silence, as published ones do."""
    return {
        "version": "1.0",
        "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                "[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]},
                "[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]},
            },
        },
        "decoder": None,
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: index for index, word in enumerate(WORDS)},
        },
    }


@pytest.fixture
def make_bert(tmp_path):
    """Writes a sentence encoder as sentence-transformers publishes it; returns its directory and its tensors."""

    def make(name="bert", *, pooling="mean_tokens", normalise=True, seed=0, **options):
        directory = tmp_path / name
        config = {**BERT, **options}
        tensors = bert_tensors({**BERT, **{k: v for k, v in options.items() if k in BERT}}, seed)
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors")
        write_json(directory / "config.json", config)
        kinds = ["Transformer", "Pooling"] + (["Normalize"] if normalise else [])
        paths = ["", "1_Pooling", "2_Normalize"]
        modules = [
            {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(kinds)
        ]
        write_json(directory / "modules.json", modules)
        modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "max_tokens")}
        write_json(directory / "1_Pooling/config.json", {"word_embedding_dimension": config["hidden_size"], **modes})
        write_json(directory / "sentence_bert_config.json", {"max_seq_length": 48, "do_lower_case": False})
        write_json(directory / "tokenizer.json", wordpiece_tokenizer())
        return directory, tensors

    return make


def byte_tokens():
    """The 256 characters by which byte-level tokenizers write bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 128, 2


def add_hyperparameters(writer):
    """The sizes of the tiny Llama."""
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_file_type(3)


def add_tokenizer(writer, chat_template):
    """A byte-level tokenizer with two merges; returns the size of its vocabulary."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "he", "ll"]
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % 32)]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if chat_template:
        writer.add_chat_template(chat_template)
    return len(tokens)


def llama_shapes(vocabulary):
    """Every tensor of the tiny Llama with its shape, as llama.cpp names them."""
    kv_size = HIDDEN // HEADS * KV_HEADS
    block = {
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv_size, HIDDEN),
        "attn_v": (kv_size, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    blocks = {f"blk.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in block.items()}
    return {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,), **blocks}


@pytest.fixture(scope="session")
def make_gguf(tmp_path_factory):
    """Writes a tiny Llama as a GGUF file with Q4_1 matrices, as the embedded model has them; returns its path."""

    def make(name="tiny.gguf", *, seed=0, architecture="llama", chat_template=CHATML, left_out=()):
        path = tmp_path_factory.mktemp("gguf") / name
        writer = gguf.GGUFWriter(path, architecture)
        add_hyperparameters(writer)
        vocabulary = add_tokenizer(writer, chat_template)
        random = np.random.default_rng(seed)
        q4_1 = gguf.GGMLQuantizationType.Q4_1
        for tensor, shape in llama_shapes(vocabulary).items():
            values = random.standard_normal(shape).astype(np.float32)
            if tensor in left_out:
                continue
            if len(shape) == 1:
                writer.add_tensor(tensor, 1 + np.float32(0.3) * values)
            else:
                writer.add_tensor(tensor, gguf.quants.quantize(np.float32(0.2) * values, q4_1), raw_dtype=q4_1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


@pytest.fixture
def store_root(tmp_path, monkeypatch):
    """A store of the test's own, also for the commands and child processes that it starts."""
    root = tmp_path / "store"
    monkeypatch.setenv(STORE_VARIABLE, str(root))
    return root


@pytest.fixture
def python():
    """The interpreter, for child processes."""
    return Path(sys.executable)
