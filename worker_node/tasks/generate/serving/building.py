"""How generation models are built, planned and admitted."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from worker_node.core.types import Device, Message
from worker_node.engines.cpu_share import CpuRole
from worker_node.engines.process import Canary
from worker_node.models.canary import GenerationCanary
from worker_node.models.directory import sampling_defaults
from worker_node.models.manifest import InstalledModel
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.scheduling.routing import NOTHING, Feature
from worker_node.scheduling.wait_estimate import Capacity
from worker_node.serving.task import EnginePlan, Footprint, ModelParts, ServedTask, Shapes, TaskParts, no_canary
from worker_node.settings import ModelSettings
from worker_node.settings.declaration import EngineOptions
from worker_node.tasks.generate.continuous_options import ContinuousOptions
from worker_node.tasks.generate.model_options import GenerationOptions
from worker_node.tasks.generate.serving.canary import generation_canary
from worker_node.tasks.generate.serving.drafting import (
    ON_NPU,
    check_devices,
    complete_draft,
    draft_cache,
    draft_weights,
)
from worker_node.tasks.generate.serving.kv_cache import kv_cache_bytes
from worker_node.tasks.generate.serving.model import GenerationModel
from worker_node.tasks.generate.serving.precision import complete_precision
from worker_node.tasks.generate.serving.schemas import schema_compiler
from worker_node.tasks.generate.serving.tokenization import ChatTokenizer
from worker_node.tasks.generate.stateful_options import StatefulOptions

log = logging.getLogger(__name__)

# With chunks of 256 a short prompt's first token takes a third of the time on the emulated NPU. What it does to a real
# one could not be measured, so there OpenVINO's own default stands.
EMULATED_CHUNK = 256
# Resident bytes for each byte of weights, measured on Linux with OpenVINO 2026.4: the CPU plugin repacks int4 and int8.
_CONTINUOUS, _STATEFUL = 2.0, 2.5
# What is kept for prompts that begin alike: some long prompts and the traffic between their repetitions.
_PREFIX_TOKENS = 16_384
_PREFIX_SHARE = 1 / 16
# Of a cache that grows as needed, what ordinary requests make it take.
_USUAL_TOKENS = 2048


class _Generate(ServedTask):
    cpu_role = CpuRole.FIRST

    def build(self, parts: ModelParts) -> GenerationModel:
        installed, wanted = parts.installed, parts.wanted
        chat = ChatTokenizer(installed.path, installed.context_limit)
        known = installed.canary

        def canary(limit: int) -> Canary:
            if not isinstance(known, GenerationCanary):
                return no_canary
            tokens = len(chat.encode_chat((Message("user", known.prompt),)))
            if tokens > limit:
                raise wanted.error(
                    "max_prompt_len",
                    f"max_prompt_len holds prompts of {limit} tokens, and {tokens} are needed: before the model "
                    "is called ready, its engine is examined with a known question",
                )
            return parts.guard(generation_canary(known, chat))

        limits = wanted.of(GenerationOptions)
        greedy = (limits.sampling_defaults or parts.settings.sampling_defaults) == "greedy"
        placements = parts.place(canary)
        defaults = sampling_defaults(installed.path)
        return GenerationModel(
            installed,
            placements,
            chat,
            limits.max_tokens_limit or sys.maxsize,
            limits.best_of_limit,
            None if greedy else defaults,
            aliases=wanted.aliases,
            idle_unload_s=wanted.idle_unload_s,
        )

    async def start(self, parts: TaskParts) -> None:
        """See `ServedTask.start`."""
        await parts.of(schema_compiler).start()

    def admission(self, options: EngineOptions) -> AdmissionLimits:
        """Units are requests."""
        match options:
            case ContinuousOptions(max_num_seqs=sequences, max_num_batched_tokens=tokens):
                capacity = Capacity(sequences, tokens, piece_tokens=tokens)
                return AdmissionLimits(256, parallel=min(64, sequences), capacity=capacity)
        return AdmissionLimits(64, capacity=Capacity(sequences=1))

    def static_shapes(
        self, installed: InstalledModel, wanted: ModelSettings, values: dict[str, Any], *, emulated: bool
    ) -> Shapes:
        check_devices(wanted)
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
        lengths = (prompt, response, values.get("prefill_chunk_size") or 0)
        return Shapes(lengths, prompt, min(prompt + response, limit))

    def complete(
        self,
        installed: InstalledModel,
        wanted: ModelSettings,
        values: dict[str, Any],
        device: Device,
        memory: int | None,
        store: Path,
    ) -> None:
        """Find the draft, size the prefix cache, and where prompts are not split, a step: it must hold any prompt.

        A longer one would never be scheduled, and hang.
        """
        complete_draft(installed, wanted, values, store)
        complete_precision(wanted, values, device)
        values.setdefault("prefix_cache_tokens", _prefix_tokens(installed, values, device, memory))
        if values.get("dynamic_split_fuse") is not False:
            return
        asked, limit = wanted.options.get("max_num_batched_tokens"), installed.context_limit
        if asked is not None and asked < limit:
            log.warning(
                "model %s: max_num_batched_tokens is raised from %d to %d, the model's context: with "
                "dynamic_split_fuse = false every prompt must fit one step",
                wanted.name,
                asked,
                limit,
            )
        values["max_num_batched_tokens"] = max(asked or 0, limit)

    def footprint(self, installed: InstalledModel, plan: EnginePlan) -> Footprint:
        match plan.options:
            case ContinuousOptions(cache_size_gb=fixed, draft_model=draft) as options:
                kept = options.prefix_cache_tokens if options.enable_prefix_caching else 0
                tokens = max(min(plan.total_limit, _USUAL_TOKENS), kept or 0)
                cache = kv_cache_bytes(installed.path, tokens) or 0
                weights = 0
                if draft is not None:
                    cache += draft_cache(Path(draft), tokens)
                    weights = int(_CONTINUOUS * draft_weights(Path(draft)))
                # A cache of a fixed size is divided between the two models.
                return Footprint(_CONTINUOUS, weights + (fixed * 2**30 or cache))
            case StatefulOptions():
                return Footprint(_STATEFUL, kv_cache_bytes(installed.path, plan.total_limit) or 0)
        return Footprint()

    def lacks(self, options: EngineOptions) -> frozenset[Feature]:
        return frozenset({"n", "logprobs"}) if isinstance(options, StatefulOptions) else NOTHING

    def uses(self, options: EngineOptions) -> tuple[Path, ...]:
        """The draft."""
        draft = options.draft_model if isinstance(options, ContinuousOptions) else None
        return () if draft is None else (Path(draft),)

    def notes(self, installed: InstalledModel, plan: EnginePlan) -> list[str]:
        """What has no effect on the NPU, and what a prompt limit above the usual one costs there.

        The cache is static, so it is taken, used or not.
        """
        if not isinstance(plan.options, StatefulOptions):
            return []
        notes = [ON_NPU] if "draft_model" in plan.ignored else []
        if plan.lengths[0] <= StatefulOptions().max_prompt_len:
            return notes
        size = kv_cache_bytes(installed.path, plan.total_limit)
        told = "an unknown amount" if size is None else f"{size / 2**20:.0f} MiB"
        return [
            *notes,
            f"max_prompt_len {plan.lengths[0]} makes a static KV cache of {plan.total_limit} tokens: {told} of memory",
        ]


def _prefix_tokens(installed: InstalledModel, values: dict[str, Any], device: Device, memory: int | None) -> int:
    """How many tokens are kept for prompts that begin alike, where nothing was set."""
    token = kv_cache_bytes(installed.path, 1)
    if not token:
        return 0
    if fixed := values.get("cache_size_gb"):
        return int(fixed * 2**30 // token)
    if device is not Device.CPU:
        return 0  # a GPU takes the memory at once, and how much it has left is not known here
    return _PREFIX_TOKENS if memory is None else min(_PREFIX_TOKENS, int(memory * _PREFIX_SHARE) // token)


GENERATE = _Generate()
