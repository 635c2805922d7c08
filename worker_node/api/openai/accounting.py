"""Fields of OpenAI's dialect that have no effect here, in requests of any task.

Sources: the API references of OpenAI, vLLM, llama.cpp's server and OpenRouter.
"""

from __future__ import annotations

from worker_node.api.leniency import hints

# They change where or for whom a request is accounted, stored or routed, never what the answer is.
ACCOUNTING = hints(
    "cache_control",
    "metadata",
    "moderation",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
    # OpenRouter's
    "models",
    "provider",
    "route",
    "session_id",
    "trace",
    "transforms",
    "usage",
    # vLLM's
    "cache_salt",
    "kv_transfer_params",
    "mm_processor_kwargs",
    "request_id",
    "vllm_xargs",
    # llama.cpp's
    "cache_prompt",
    "id_slot",
    "n_cache_reuse",
    "n_keep",
    "return_progress",
    "slot_id",
    "sse_ping_interval",
    "timings_per_token",
)
