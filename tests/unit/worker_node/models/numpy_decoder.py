"""What llama.cpp computes of a GGUF file, written in numpy."""

import numpy as np
from gguf import GGUFReader, dequantize


def logits(path, ids):
    """Of each token of one text, f32 [tokens, vocabulary]."""
    return _Decoder(path).logits(ids)


class _Decoder:
    def __init__(self, path):
        self._reader = GGUFReader(path)
        self._architecture = self._reader.fields["general.architecture"].contents()
        self._tensors = {
            tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in self._reader.tensors
        }
        self._heads, self._kv_heads = self._field("attention.head_count"), self._field("attention.head_count_kv")

    def _field(self, name):
        return self._reader.fields[f"{self._architecture}.{name}"].contents()

    def logits(self, ids):
        x = self._tensors["token_embd.weight"][ids]
        for layer in range(self._field("block_count")):
            block = f"blk.{layer}."
            x = x + self._attention(block, self._norm(block + "attn_norm", x))
            x = x + self._feed_forward(block, self._norm(block + "ffn_norm", x))
        output = self._tensors.get("output.weight", self._tensors["token_embd.weight"])
        return self._norm("output_norm", x) @ output.T

    def _norm(self, name, x):
        size = np.sqrt((x**2).mean(-1, keepdims=True) + self._field("attention.layer_norm_rms_epsilon"))
        return x / size * self._tensors[f"{name}.weight"]

    def _linear(self, name, x):
        return x @ self._tensors[f"{name}.weight"].T + self._tensors.get(f"{name}.bias", 0)

    def _attention(self, block, x):
        query, key, value = (
            self._linear(f"{block}attn_{part}", x).reshape(len(x), heads, -1)
            for part, heads in (("q", self._heads), ("k", self._kv_heads), ("v", self._kv_heads))
        )
        if self._architecture == "qwen3":
            query, key = self._norm(block + "attn_q_norm", query), self._norm(block + "attn_k_norm", key)
        query, key = self._rotate(query), self._rotate(key)
        key, value = (np.repeat(part, self._heads // self._kv_heads, axis=1) for part in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(query.shape[2])
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self._linear(f"{block}attn_output", np.einsum("hqk,khd->qhd", weights, value).reshape(len(x), -1))

    def _rotate(self, x):
        """Llama's files hold the two numbers of a pair side by side, others half a head apart."""
        length, _, size = x.shape
        angles = np.outer(np.arange(length), self._field("rope.freq_base") ** -(np.arange(0, size, 2) / size))
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        if self._architecture == "llama":
            first, second = np.s_[..., 0::2], np.s_[..., 1::2]
        else:
            first, second = np.s_[..., : size // 2], np.s_[..., size // 2 :]
        turned = np.empty_like(x)
        turned[first] = x[first] * cos - x[second] * sin
        turned[second] = x[first] * sin + x[second] * cos
        return turned

    def _feed_forward(self, block, x):
        gate = self._linear(block + "ffn_gate", x)
        return self._linear(block + "ffn_down", gate / (1 + np.exp(-gate)) * self._linear(block + "ffn_up", x))
