"""Which engine runs a model on a device, with what options and limits: decided from settings, before anything runs."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from worker_node.devices.npu_source import NpuSource
from worker_node.domain import Device, ModelKind
from worker_node.models.manifest import InstalledModel
from worker_node.options.declaration import EngineOptions, declarations, engine_for, engines, options_of
from worker_node.settings import ModelSettings, NodeSettings, PlacementSettings
from worker_node.settings.options import engine_options, select
from worker_node.tasks.generate.stateful_options import StatefulOptions

log = logging.getLogger(__name__)

SMALLEST_BUCKET = 32
# With chunks of 256 a short prompt's first token takes a third of the time on the emulated NPU. What it does to a real
# one could not be measured, so there OpenVINO's own default stands.
EMULATED_CHUNK = 256


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """`lengths` are the static shapes in tokens (none where shapes are dynamic); `ignored` names the settings that this
    engine has no use for."""

    options: EngineOptions
    prompt_limit: int
    total_limit: int
    lengths: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def runner(self) -> str:
        """The name of the engine."""
        return self.options.engine


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
    declaration = engine_for(installed.kind, place.device)
    values = select(declaration, wanted.options)
    if place.plugin_config:
        values["plugin_config"] = dict(place.plugin_config)
    ignored = tuple(sorted(_ignored(installed.kind, wanted, place.device, beside)))
    if place.device is not Device.NPU:
        if values.get("dynamic_split_fuse") is False:
            values["max_num_batched_tokens"] = _whole_prompts(installed, wanted)
        limit = installed.context_limit
        return EnginePlan(engine_options(declaration, values), limit, limit, ignored=ignored)
    values |= {"busy_counter": str(npu.busy_counter), "stand_in": npu.stand_in}
    if installed.kind is ModelKind.EMBEDDING:
        lengths, prompt, total = _static_embedding(installed, wanted, values)
    else:
        lengths, prompt, total = _stateful_generation(installed, wanted, values, emulated=npu.emulated)
    options = engine_options(declaration, values)
    return EnginePlan(options, min(prompt, settings.npu_token_limit), total, lengths, ignored)


def _ignored(kind: ModelKind, wanted: ModelSettings, device: Device, beside: Collection[Device]) -> set[str]:
    """The options that were set for an engine of this kind of model, and not for the device's."""
    every = {name for owner in engines() if owner.task is kind for name in options_of(owner)}
    used = set(options_of(engine_for(kind, device)))
    if device is not Device.NPU and Device.NPU in beside:
        used |= options_of(engine_for(kind, Device.NPU)).keys()  # they are for the other placement
    return (wanted.options.keys() & every) - used


def _whole_prompts(installed: InstalledModel, wanted: ModelSettings) -> int:
    """The tokens of one step where prompts are not split: a longer prompt would never be scheduled, and hang."""
    asked = wanted.options.get("max_num_batched_tokens")
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
    """Raise ConfigurationError for options that nothing that runs this kind of model has."""
    known = {name for owner in declarations() if owner.task is installed.kind for name in options_of(owner)}
    foreign = sorted(wanted.options.keys() - known)
    if foreign:
        raise wanted.error(
            foreign[0], f"{', '.join(foreign)} cannot be used by an engine for {installed.kind}; remove it"
        )


def buckets_up_to(limit: int) -> tuple[int, ...]:
    """32, 64, 128 … and the limit itself, in tokens."""
    buckets = []
    length = SMALLEST_BUCKET
    while length < limit:
        buckets.append(length)
        length *= 2
    return (*buckets, limit)


def _static_embedding(
    installed: InstalledModel, wanted: ModelSettings, values: dict[str, Any]
) -> tuple[tuple[int, ...], int, int]:
    limit = installed.context_limit
    buckets = tuple(sorted(set(values.get("npu_buckets") or buckets_up_to(limit))))
    if buckets[-1] > limit:
        raise wanted.error("npu_buckets", f"a bucket of {buckets[-1]} tokens, the model takes {limit}")
    values["npu_buckets"] = buckets
    return (*buckets, values.get("npu_batch_size", 1)), buckets[-1], buckets[-1]


def _stateful_generation(
    installed: InstalledModel, wanted: ModelSettings, values: dict[str, Any], *, emulated: bool
) -> tuple[tuple[int, ...], int, int]:
    limit = installed.context_limit
    defaults = StatefulOptions()
    prompt = values.get("max_prompt_len") or min(installed.max_prompt_len or defaults.max_prompt_len, limit)
    response = values.get("min_response_len", defaults.min_response_len)
    if prompt > limit:
        raise wanted.error("max_prompt_len", f"max_prompt_len is {prompt}, the model's context {limit} tokens")
    values["max_prompt_len"] = prompt
    if emulated and values.get("prefill_hint") != "STATIC":
        # The largest power of two that neither exceeds the prompt.
        values.setdefault("prefill_chunk_size", max(16, min(EMULATED_CHUNK, 1 << (prompt.bit_length() - 1))))
    return (prompt, response, values.get("prefill_chunk_size") or 0), prompt, min(prompt + response, limit)
