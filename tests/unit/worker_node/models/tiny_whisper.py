"""A tiny Whisper network with random weights by OpenAI's names, and what it computes, written in numpy.

The numpy form shares no code with the conversion: plain attention over whole sequences, no state, no masks by pattern.
"""

import math

import numpy as np

SIZES = {
    "n_mels": 4,
    "n_audio_ctx": 6,
    "n_audio_state": 16,
    "n_audio_head": 2,
    "n_audio_layer": 2,
    "n_vocab": 40,
    "n_text_ctx": 12,
    "n_text_state": 16,
    "n_text_head": 2,
    "n_text_layer": 2,
}


def tensors(seed=0):
    """Random weights of the network that SIZES describes."""
    random = np.random.default_rng(seed)
    size = SIZES["n_audio_state"]
    shapes = {
        "encoder.conv1.weight": (size, SIZES["n_mels"], 3),
        "encoder.conv1.bias": (size,),
        "encoder.conv2.weight": (size, size, 3),
        "encoder.conv2.bias": (size,),
        "encoder.positional_embedding": (SIZES["n_audio_ctx"], size),
        "encoder.ln_post.weight": (size,),
        "encoder.ln_post.bias": (size,),
        "decoder.token_embedding.weight": (SIZES["n_vocab"], size),
        "decoder.positional_embedding": (SIZES["n_text_ctx"], size),
        "decoder.ln.weight": (size,),
        "decoder.ln.bias": (size,),
    }
    for side in ("encoder", "decoder"):
        for layer in range(2):
            block = f"{side}.blocks.{layer}"
            for attention in ("attn", "cross_attn") if side == "decoder" else ("attn",):
                for part in ("query", "key", "value", "out"):
                    shapes[f"{block}.{attention}.{part}.weight"] = (size, size)
                    if part != "key":
                        shapes[f"{block}.{attention}.{part}.bias"] = (size,)
                shapes[f"{block}.{attention}_ln.weight"] = shapes[f"{block}.{attention}_ln.bias"] = (size,)
            shapes[f"{block}.mlp.0.weight"], shapes[f"{block}.mlp.0.bias"] = (4 * size, size), (4 * size,)
            shapes[f"{block}.mlp.2.weight"], shapes[f"{block}.mlp.2.bias"] = (size, 4 * size), (size,)
            shapes[f"{block}.mlp_ln.weight"] = shapes[f"{block}.mlp_ln.bias"] = (size,)
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def encode(weights, mel):
    """Hidden states [n_audio_ctx, size] of a spectrogram [n_mels, 2 × n_audio_ctx]."""
    x = _gelu(_convolve(weights, "encoder.conv1", mel, 1))
    x = _gelu(_convolve(weights, "encoder.conv2", x, 2)).T + weights["encoder.positional_embedding"]
    for layer in range(2):
        block = f"encoder.blocks.{layer}"
        normal = _norm(weights, f"{block}.attn_ln", x)
        x = x + _attend(weights, f"{block}.attn", normal, normal)
        x = x + _mlp(weights, block, x)
    return _norm(weights, "encoder.ln_post", x)


def decode(weights, audio, ids):
    """Logits [length, n_vocab] of all tokens at once."""
    x = weights["decoder.token_embedding.weight"][ids] + weights["decoder.positional_embedding"][: len(ids)]
    for layer in range(2):
        block = f"decoder.blocks.{layer}"
        normal = _norm(weights, f"{block}.attn_ln", x)
        x = x + _attend(weights, f"{block}.attn", normal, normal, causal=True)
        x = x + _attend(weights, f"{block}.cross_attn", _norm(weights, f"{block}.cross_attn_ln", x), audio)
        x = x + _mlp(weights, block, x)
    return _norm(weights, "decoder.ln", x) @ weights["decoder.token_embedding.weight"].T


def _convolve(weights, name, x, stride):
    kernel, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    padded = np.pad(x, ((0, 0), (1, 1)))
    steps = range(0, x.shape[1], stride)
    return np.stack([np.einsum("oik,ik->o", kernel, padded[:, at : at + 3]) + bias for at in steps], axis=1)


def _gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _norm(weights, name, x):
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _mlp(weights, block, x):
    normal = _norm(weights, f"{block}.mlp_ln", x)
    inner = _gelu(normal @ weights[f"{block}.mlp.0.weight"].T + weights[f"{block}.mlp.0.bias"])
    return inner @ weights[f"{block}.mlp.2.weight"].T + weights[f"{block}.mlp.2.bias"]


def _attend(weights, name, x, source, *, causal=False):
    query = x @ weights[f"{name}.query.weight"].T + weights[f"{name}.query.bias"]
    key = source @ weights[f"{name}.key.weight"].T
    value = source @ weights[f"{name}.value.weight"].T + weights[f"{name}.value.bias"]
    heads = []
    for part in np.split(np.arange(query.shape[1]), 2):
        score = query[:, part] @ key[:, part].T / math.sqrt(len(part))
        if causal:
            score = np.where(np.tril(np.ones(score.shape, bool)), score, -np.inf)
        share = np.exp(score - score.max(axis=-1, keepdims=True))
        heads.append(share / share.sum(axis=-1, keepdims=True) @ value[:, part])
    return np.concatenate(heads, axis=1) @ weights[f"{name}.out.weight"].T + weights[f"{name}.out.bias"]
