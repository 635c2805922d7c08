"""What to say about a key that no setting has: the nearest known name, or our name for another server's option."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

# Keys of other servers (OpenVINO Model Server, vLLM, Text Embeddings Inference, Ollama), and what stands for them here.
_OF_THE_NODE: Mapping[str, str] = {
    "allowed_origins": "cors_origins",
    "api_key": "api_keys (a list)",
    "api_key_file": "api_keys_file",
    "bind": "host",
    "cache_dir": "compile_cache",
    "model_config_list": "[[models]], one table for each model",
    "model": "[[models]], one table for each model",
    "model_path": "path in [[models]]",
    "models_path": "path in [[models]]",
    "base_path": "path in [[models]]",
    "model_repository_path": "model_store",
    "ollama_host": "host and ollama_port",
    "ollama_models": "model_store",
    "rest_bind_address": "host",
    "rest_port": "port",
    "timeout": "request_timeout_s",
    "workers": "nothing: one process serves, and every model has a process of its own",
}
_OF_A_MODEL: Mapping[str, str] = {
    "base_path": "path",
    "batch_size": "max_num_seqs (generation) or max_batch_tokens (embedding)",
    "block_size": "nothing: OpenVINO chooses the size of a cache block",
    "cache_dir": "compile_cache",
    "device": 'placements, for example placements = ["NPU", "CPU"]',
    "dtype": "precision (embedding) or kv_cache_precision (generation)",
    "gpu_memory_utilization": "cache_size_gb",
    "keep_alive": "idle_unload_s, in seconds",
    "kv_cache_dtype": "kv_cache_precision",
    "max_batch_requests": "max_outstanding",
    "max_concurrent_requests": "max_outstanding",
    "max_model_len": "max_prompt_len and min_response_len (NPU); other devices take the model's own context",
    "max_num_seq": "max_num_seqs",
    "model": "name, or path for a directory",
    "model_name": "name",
    "model_path": "path",
    "models_path": "path",
    "num_ctx": "max_prompt_len and min_response_len (NPU); a request may send num_ctx",
    "num_parallel": "max_num_seqs",
    "plugin_config": 'a placement: placements = [{ device = "NPU", plugin_config = { … } }]',
    "served_model_name": "aliases, a list",
    "target_device": 'placements, for example placements = ["NPU", "CPU"]',
}
_SIMILAR = 0.6


def advice(key: str, known: Collection[str], *, of_a_model: bool = False) -> str:
    """What the user may have meant by `key`; an empty string when nothing is near."""
    name = key.strip().lower().replace("-", "_")
    theirs = _OF_A_MODEL if of_a_model else _OF_THE_NODE
    if name not in known and (ours := theirs.get(name)) is not None:
        return f"here that is {ours}"
    near = difflib.get_close_matches(name, known, 1, _SIMILAR)
    return f"did you mean {near[0]}?" if near else ""
