"""A tiny sentence encoder with random weights, in the form in which encoders are published."""

import json

import numpy as np
import openvino as ov
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz", *"0123456789", ".", ",", "the", "cat", "##s"]

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
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8, pad_token="[PAD]")
    return tokenizer.to_str()


def write_encoder(directory, *, pooling="mean_tokens", normalise=True, seed=0, **options):
    """Write a sentence encoder as sentence-transformers publishes it; returns its tensors."""
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
    (directory / "tokenizer.json").write_text(wordpiece_tokenizer())
    return tensors


def embed(model, text):
    """The vector of a text by an installed model's graph, in float32 on the CPU."""
    compiled = ov.compile_model(model.path / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    ids = np.array([Tokenizer.from_file(str(model.path / "tokenizer.json")).encode(text).ids], dtype=np.int64)
    return compiled({"input_ids": ids, "attention_mask": np.ones_like(ids)})["embedding"][0]
