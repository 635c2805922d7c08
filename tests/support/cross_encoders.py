"""Cross-encoders for tests, in the form in which they are published. No real reranker comes in a package.

`write_minilm` has the real body of all-MiniLM-L6-v2, taken out of the installed model's graph, with token types, a
pooler and a classifier of fixed random numbers: its scores mean nothing, and are computed as a real reranker's are.
`write_tiny` is random throughout.
"""

import json
import shutil

import numpy as np
import openvino as ov
from safetensors.numpy import save_file

from tests.support.tiny_encoder import BERT, bert_tensors, wordpiece_tokenizer

HEADS = 12
_LAYER = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)


def minilm_body(directory):
    """The tensors of the installed MiniLM by Hugging Face's names; its positions hold token type 0 already."""
    model = ov.Core().read_model(directory / "openvino_model.xml")
    constants = [op for op in model.get_ordered_ops() if op.get_type_name() == "Constant"]
    floats = iter([c.data.squeeze() for c in constants if c.data.dtype == np.float32 and c.data.size > 1])
    tensors = {f"embeddings.{name}_embeddings.weight": next(floats) for name in ("word", "position")}
    tensors["embeddings.token_type_embeddings.weight"] = np.zeros((2, 384), np.float32)
    names = ["embeddings.LayerNorm", *(f"encoder.layer.{n}.{part}" for n in range(6) for part in _LAYER)]
    tensors |= {f"{name}.{part}": next(floats) for name in names for part in ("weight", "bias")}
    assert next(floats, None) is None
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def minilm_tensors(directory, labels=1, seed=1):
    random = np.random.default_rng(seed)

    def some(*shape, scale):
        return (random.standard_normal(shape) * scale).astype(np.float32)

    tensors = {f"bert.{name}": tensor for name, tensor in minilm_body(directory).items()}
    tensors["bert.embeddings.token_type_embeddings.weight"][1] = some(384, scale=0.05)
    tensors["bert.pooler.dense.weight"] = some(384, 384, scale=0.2)
    tensors["bert.pooler.dense.bias"] = some(384, scale=0.1)
    tensors["classifier.weight"] = some(labels, 384, scale=0.2)
    tensors["classifier.bias"] = some(labels, scale=0.1)
    return tensors


def write_minilm(directory, installed, *, labels=1, seed=1):
    """Write the directory; returns its tensors. `installed` is the directory of the installed MiniLM."""
    tensors = minilm_tensors(installed, labels, seed)
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": HEADS}
    more = {"max_position_embeddings": 512, "vocab_size": 30522}
    _write(directory, "BertForSequenceClassification", tensors, BERT | sizes | more, labels)
    shutil.copyfile(installed / "tokenizer.json", directory / "tokenizer.json")
    return tensors


def write_tiny(directory, *, architecture="BertForSequenceClassification", labels=1, seed=0, **options):
    random = np.random.default_rng(seed)
    roberta = architecture != "BertForSequenceClassification"
    config = {**BERT, **({"type_vocab_size": 1, "pad_token_id": 1} if roberta else {}), **options}
    size, prefix = config["hidden_size"], "roberta." if roberta else "bert."
    tensors = bert_tensors(config, seed)
    tensors["embeddings.token_type_embeddings.weight"] = tensors["embeddings.token_type_embeddings.weight"][
        : config["type_vocab_size"]
    ]
    if roberta:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler")}
    tensors = {prefix + name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    heads = {"classifier.dense": (size, size), "classifier.out_proj": (labels, size)}
    for name, shape in heads.items() if roberta else [("classifier", (labels, size))]:
        tensors[f"{name}.weight"] = random.standard_normal(shape).astype(np.float32)
        tensors[f"{name}.bias"] = random.standard_normal(shape[:1]).astype(np.float32)
    _write(directory, architecture, tensors, config, labels)
    (directory / "tokenizer.json").write_text(wordpiece_tokenizer())
    return tensors


_TYPES = {
    "BertForSequenceClassification": "bert",
    "RobertaForSequenceClassification": "roberta",
    "XLMRobertaForSequenceClassification": "xlm-roberta",
}


def _write(directory, architecture, tensors, config, labels):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    stated = {"architectures": [architecture], "model_type": _TYPES.get(architecture, "other")}
    stated["id2label"] = {str(label): f"LABEL_{label}" for label in range(labels)}
    (directory / "config.json").write_text(json.dumps(config | stated))
