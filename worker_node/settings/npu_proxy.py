"""The environment variables of npu-proxy: those that mean the same here are taken over, the others are answered.

They count for less than anything that is said in this node's own words (docs/coming-from.md).
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "NPU_PROXY_"
# What means the same in the same unit.
_SAME = {
    "HOST": "host",
    "PORT": "port",
    "TOKEN_LIMIT": "npu_token_limit",
    "COMPILE_CACHE_DIR": "compile_cache",
    "ALLOWED_HOSTS": "allowed_hosts",
    "INFERENCE_TIMEOUT": "request_timeout_s",
    "LOAD_TIMEOUT": "load_timeout_s",
    "EMBEDDING_CACHE_SIZE": "embedding_cache",
}
_INSTEAD = {
    "DEVICE": 'placements = ["NPU", "CPU"] of a model, in their order',
    "PREFERRED_DEVICE": 'placements = ["NPU", "CPU"] of a model, in their order',
    "FALLBACK_DEVICE": 'placements = ["NPU", "CPU"] of a model, in their order',
    "EMBEDDING_DEVICE": 'placements = ["NPU"] of the embedding model',
    "EMBEDDING_MODEL": "[[models]] with its name, after npu-node pull NAME",
    "MAX_PROMPT_LEN": "max_prompt_len in the settings of a model",
    "REAL_INFERENCE": "nothing: a node never makes answers up",
    "EMBEDDING_FALLBACK_MODE": "nothing: a node never makes vectors up",
    "LOG_LEVEL": "npu-node serve --log-level",
    "MODEL_DIR": "NPU_NODE_MODEL_STORE, after npu-node convert DIRECTORY for each model",
}


def inherited(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Variable and value by the name of the setting, for those that are taken over; empty values set nothing."""
    return {
        setting: (PREFIX + name, value)
        for name, setting in _SAME.items()
        if (value := environment.get(PREFIX + name, ""))
    }


def notices(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable of npu-proxy: what it became, or what to write instead."""
    lines = []
    for name in sorted(environment):
        if not name.startswith(PREFIX) or not environment[name]:
            continue
        key = name.removeprefix(PREFIX)
        if key in _SAME:
            lines.append(f"{name} is npu-proxy's; it is understood as NPU_NODE_{_SAME[key].upper()}: rename it")
        else:
            lines.append(f"{name} is npu-proxy's and has no effect; here it is {_INSTEAD.get(key, 'not needed')}")
    return lines
