"""The `options` of Ollama's dialect that this node does not implement."""

from __future__ import annotations

from worker_node.api.leniency import Table, Unsupported, hints

_MIROSTAT = "this engine has no Mirostat sampling"

# On memory and threads, which this node uses in its own way.
OPTIONS: Table = {
    **hints(
        "draft_num_predict",
        "embedding_only",
        "f16_kv",
        "logits_all",
        "low_vram",
        "main_gpu",
        "num_batch",
        "num_gpu",
        "num_gqa",
        "num_keep",
        "num_thread",
        "numa",
        "rope_frequency_base",
        "rope_frequency_scale",
        "use_mlock",
        "use_mmap",
        "vocab_only",
    ),
    "mirostat": Unsupported(_MIROSTAT),
    "mirostat_eta": Unsupported(_MIROSTAT),
    "mirostat_tau": Unsupported(_MIROSTAT),
    "repeat_last_n": Unsupported("this engine's penalties count the whole answer", (-1,)),
    "tfs_z": Unsupported("this engine has no tail-free sampling", (1,)),
    "typical_p": Unsupported("this engine has no typical sampling", (1,)),
}
