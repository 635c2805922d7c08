"""Which engine runs a model on a device, with what options and limits: decided from settings, before anything runs."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from worker_node.devices.npu_source import NpuSource
from worker_node.domain import Device, ModelKind
from worker_node.errors import ConfigurationError
from worker_node.models.manifest import InstalledModel
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings

log = logging.getLogger(__name__)

DEFAULT_MAX_PROMPT_LEN = 1024
DEFAULT_MIN_RESPONSE_LEN = 128
SMALLEST_BUCKET = 32
# With chunks of 256 a short prompt's first token takes a third of the time on the emulated NPU. What it does to a real
# one could not be measured, so there OpenVINO's own default stands.
EMULATED_CHUNK = 256

_USED: dict[str, frozenset[str]] = {
    "embedding": frozenset({"precision", "streams", "max_batch_tokens"}),
    "embedding_static": frozenset({"npu_buckets", "npu_batch_size"}),
    "generation_continuous": frozenset(
        {
            "max_num_batched_tokens",
            "max_num_seqs",
            "cache_size_gb",
            "dynamic_split_fuse",
            "enable_prefix_caching",
            "kv_cache_precision",
        }
    ),
    "generation_stateful": frozenset(
        {"max_prompt_len", "min_response_len", "prefill_hint", "generate_hint", "prefill_chunk_size"}
    ),
}
_RUNNERS: dict[ModelKind, tuple[str, str]] = {
    ModelKind.EMBEDDING: ("embedding_static", "embedding"),
    ModelKind.GENERATION: ("generation_stateful", "generation_continuous"),
}


# Used by the node itself, whichever engine runs the model.
_USED_BY_NODE: dict[ModelKind, frozenset[str]] = {
    ModelKind.EMBEDDING: frozenset(),
    ModelKind.GENERATION: frozenset({"max_tokens_limit", "best_of_limit"}),
}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """`lengths` are the static shapes in tokens (none where shapes are dynamic); `ignored` names the settings that this
    engine has no use for."""

    runner: str
    options: dict[str, object]
    prompt_limit: int
    total_limit: int
    lengths: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()


def plan_engine(
    installed: InstalledModel,
    wanted: ModelSettings,
    place: PlacementSettings,
    beside: Collection[Device],
    settings: NodeSettings,
    npu: NpuSource,
) -> EnginePlan:
    """Return the plan for one placement of a model that is placed on all devices of `beside`.

    Raises ConfigurationError when its lengths do not fit the model.
    """
    on_npu, elsewhere = _RUNNERS[installed.kind]
    runner = on_npu if place.device is Device.NPU else elsewhere
    options: dict[str, object] = {name: value for name in _USED[runner] if (value := getattr(wanted, name)) is not None}
    ignored = _set_options(wanted, _USED[on_npu] | _USED[elsewhere]) - options.keys()
    if place.device is not Device.NPU and Device.NPU in beside:
        ignored -= _USED[on_npu]  # they are for the other placement and need no word here
    plugin_config = dict(place.plugin_config)
    if (precision := options.pop("kv_cache_precision", None)) is not None:
        plugin_config = {"KV_CACHE_PRECISION": precision} | plugin_config
    if plugin_config:
        options["plugin_config"] = plugin_config
    if place.device is not Device.NPU:
        if options.get("dynamic_split_fuse") is False:
            options["max_num_batched_tokens"] = _whole_prompts(installed, wanted)
        return EnginePlan(
            runner, options, installed.context_limit, installed.context_limit, ignored=tuple(sorted(ignored))
        )
    options |= {"busy_counter": str(npu.busy_counter), "stand_in": npu.stand_in}
    if installed.kind is ModelKind.EMBEDDING:
        lengths, prompt, total = _static_embedding(installed, wanted, options)
    else:
        lengths, prompt, total = _stateful_generation(installed, wanted, options, emulated=npu.emulated)
    return EnginePlan(
        runner, options, min(prompt, settings.npu_token_limit), total, lengths, ignored=tuple(sorted(ignored))
    )


def _whole_prompts(installed: InstalledModel, wanted: ModelSettings) -> int:
    """The tokens of one step where prompts are not split: a longer prompt would never be scheduled, and hang."""
    asked = wanted.max_num_batched_tokens
    if asked is not None and asked < installed.context_limit:
        log.warning(
            "model %s: max_num_batched_tokens is raised from %d to %d, the model's context: with "
            "dynamic_split_fuse = false every prompt must fit one step",
            wanted.name,
            asked,
            installed.context_limit,
        )
    return max(asked or 0, installed.context_limit)


def refuse_foreign_options(installed: InstalledModel, wanted: ModelSettings) -> None:
    """Raise ConfigurationError for settings that no engine for this kind of model knows."""
    every = frozenset[str]().union(*_USED.values(), *_USED_BY_NODE.values())
    known = _USED_BY_NODE[installed.kind].union(*(_USED[runner] for runner in _RUNNERS[installed.kind]))
    foreign = sorted(_set_options(wanted, every - known))
    if foreign:
        raise ConfigurationError(
            f"model {wanted.name}: {', '.join(foreign)} cannot be used by an engine for {installed.kind}; remove it"
        )


def buckets_up_to(limit: int) -> tuple[int, ...]:
    """32, 64, 128 … and the limit itself, in tokens."""
    buckets = []
    length = SMALLEST_BUCKET
    while length < limit:
        buckets.append(length)
        length *= 2
    return (*buckets, limit)


def _set_options(wanted: ModelSettings, names: frozenset[str]) -> set[str]:
    return {name for name in names if getattr(wanted, name) is not None}


def _static_embedding(
    installed: InstalledModel, wanted: ModelSettings, options: dict[str, object]
) -> tuple[tuple[int, ...], int, int]:
    limit = installed.context_limit
    buckets = wanted.npu_buckets or buckets_up_to(limit)
    if buckets[-1] > limit:
        raise ConfigurationError(f"model {wanted.name}: a bucket of {buckets[-1]} tokens, the model takes {limit}")
    batch = wanted.npu_batch_size or 1
    options |= {"buckets": list(buckets), "batch": batch}
    options.pop("npu_buckets", None)
    options.pop("npu_batch_size", None)
    return (*buckets, batch), buckets[-1], buckets[-1]


def _stateful_generation(
    installed: InstalledModel, wanted: ModelSettings, options: dict[str, object], *, emulated: bool
) -> tuple[tuple[int, ...], int, int]:
    limit = installed.context_limit
    prompt = wanted.max_prompt_len or min(installed.max_prompt_len or DEFAULT_MAX_PROMPT_LEN, limit)
    response = wanted.min_response_len or DEFAULT_MIN_RESPONSE_LEN
    if prompt > limit:
        raise ConfigurationError(f"model {wanted.name}: max_prompt_len is {prompt}, the model's context {limit} tokens")
    options |= {"max_prompt_len": prompt, "min_response_len": response}
    if emulated and wanted.prefill_hint != "STATIC":
        # The largest power of two that neither exceeds the prompt.
        options.setdefault("prefill_chunk_size", min(EMULATED_CHUNK, 1 << (prompt.bit_length() - 1)))
    chunk = options.get("prefill_chunk_size")
    return (prompt, response, chunk if isinstance(chunk, int) else 0), prompt, min(prompt + response, limit)
