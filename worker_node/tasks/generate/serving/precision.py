"""The precision of a paged KV cache on the CPU, and the one that it needs the model to be computed in.

OpenVINO's CPU plugin takes quantised caches and f16 beside any precision of computing, but f32 and bf16 only beside
their own; beside another the model loads, and its first request fails. A cache in u4 that grows makes OpenVINO 2026.4.1
write beyond its memory, which ends the engine.
"""

from __future__ import annotations

from typing import Any

from worker_node.core.types import Device
from worker_node.settings import ModelSettings

HINT = "INFERENCE_PRECISION_HINT"
_NEED_THEIR_OWN = frozenset({"f32", "bf16"})


def complete_precision(wanted: ModelSettings, values: dict[str, Any], device: Device) -> None:
    """Compute in the precision that the cache needs.

    Raises ConfigurationError when `plugin_config` sets another, and for a cache in u4 without a fixed size.
    """
    plugin_config = values.get("plugin_config", {})
    kept = values.get("kv_cache_precision")
    if device is not Device.CPU:
        return
    if "u4" in {kept, plugin_config.get("KV_CACHE_PRECISION")} and not values.get("cache_size_gb"):
        raise wanted.error(
            "kv_cache_precision",
            "a KV cache in u4 must have a fixed size on the CPU, since OpenVINO fails when it grows; set "
            "cache_size_gb, or use u8",
        )
    if kept not in _NEED_THEIR_OWN:
        return
    computed = plugin_config.get(HINT, kept)
    if computed != kept:
        raise wanted.error(
            "kv_cache_precision",
            f"a KV cache in {kept} needs {HINT} = {kept!r} on the CPU, and plugin_config sets {computed!r}; leave one "
            "of them out, or use u8, u4 or f16, which go with any",
        )
    values["plugin_config"] = plugin_config | {HINT: kept}
