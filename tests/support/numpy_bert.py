"""BERT in plain numpy, from its paper and Hugging Face's names of tensors: an oracle that shares nothing with the node.

In float64, one text at a time and without a mask, so that no padding, batching or rounding can hide in it.
"""

import math

import numpy as np

_erf = np.vectorize(math.erf)


def hidden_states(tensors, heads, ids, types, *, prefix="", first_position=0, epsilon=1e-12, gelu=None):
    get = _reader(tensors, prefix)
    x = get("embeddings.word_embeddings.weight")[ids]
    x = x + get("embeddings.position_embeddings.weight")[first_position : first_position + len(ids)]
    x = x + get("embeddings.token_type_embeddings.weight")[types]
    x = _norm(get, "embeddings.LayerNorm", x, epsilon)
    layers = len({name.split("layer.")[1].split(".")[0] for name in tensors if "encoder.layer." in name})
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        queries, keys, values = (
            _heads(_linear(get, f"{name}.attention.self.{part}", x), heads) for part in ("query", "key", "value")
        )
        scores = queries @ keys.transpose(0, 2, 1) / math.sqrt(queries.shape[-1])
        mixed = (_softmax(scores) @ values).transpose(1, 0, 2).reshape(x.shape)
        mixed = _linear(get, f"{name}.attention.output.dense", mixed)
        x = _norm(get, f"{name}.attention.output.LayerNorm", mixed + x, epsilon)
        wide = _linear(get, f"{name}.intermediate.dense", x)
        wide = wide * 0.5 * (1.0 + _erf(wide / math.sqrt(2.0))) if gelu is None else gelu(wide)
        x = _norm(get, f"{name}.output.LayerNorm", _linear(get, f"{name}.output.dense", wide) + x, epsilon)
    return x


def bert_logits(tensors, heads, ids, types, **options):
    hidden = hidden_states(tensors, heads, ids, types, prefix="bert.", **options)
    pooled = np.tanh(_linear(_reader(tensors, ""), "bert.pooler.dense", hidden[0]))
    return _linear(_reader(tensors, ""), "classifier", pooled)


def roberta_logits(tensors, heads, ids, *, padding_id=1, **options):
    types = [0] * len(ids)
    first = padding_id + 1
    hidden = hidden_states(tensors, heads, ids, types, prefix="roberta.", first_position=first, **options)
    get = _reader(tensors, "")
    return _linear(get, "classifier.out_proj", np.tanh(_linear(get, "classifier.dense", hidden[0])))


def _reader(tensors, prefix):
    return lambda name: np.asarray(tensors[prefix + name], np.float64)


def _linear(get, name, x):
    return x @ get(f"{name}.weight").T + get(f"{name}.bias")


def _norm(get, name, x, epsilon):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return scaled * get(f"{name}.weight") + get(f"{name}.bias")


def _heads(x, heads):
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def _softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
