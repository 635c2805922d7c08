"""How much memory a static KV cache takes, from the model's own configuration."""

from __future__ import annotations

import json
from pathlib import Path

_BYTES_PER_VALUE = 2  # the NPU keeps keys and values in f16


def kv_cache_bytes(directory: Path, tokens: int) -> int | None:
    """Bytes for keys and values of `tokens` tokens; None where `config.json` does not tell the model's shape."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
        layers = int(config["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
    return 2 * layers * kv_heads * head_size * _BYTES_PER_VALUE * tokens
