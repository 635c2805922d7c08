"""How generation models are built, planned and admitted: precision and memory of the KV cache, canary."""

from __future__ import annotations

import json
import sys
import time
from contextlib import aclosing
from pathlib import Path

import numpy as np

from worker_node.core.types import NOTHING, Device, Feature
from worker_node.engines.options import EngineOptions
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import TOKEN_DTYPE, JobEngine
from worker_node.models.directory import GenerationCanary, InstalledModel, sampling_defaults
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.serving.run import TaskParts
from worker_node.serving.task import Draft, EnginePlan, Footprint, ModelParts, ServedTask, Shapes, no_canary
from worker_node.tasks.generate.chat import Message
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta
from worker_node.tasks.generate.model import GenerationModel
from worker_node.tasks.generate.options import ContinuousOptions, GenerationOptions, StatefulOptions
from worker_node.tasks.generate.schemas import schema_compiler
from worker_node.tasks.generate.tokenization import ChatTokenizer

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
        await parts.of(schema_compiler).start()

    def admission(self, options: EngineOptions) -> AdmissionLimits:
        """Units are requests."""
        match options:
            case ContinuousOptions(max_num_seqs=sequences, max_num_batched_tokens=tokens):
                return AdmissionLimits(256, parallel=min(64, sequences), sequences=sequences, step_tokens=tokens)
        return AdmissionLimits(64, sequences=1)

    def static_shapes(self, draft: Draft) -> Shapes:
        values = draft.values
        prompt, response = prompt_and_response(draft)
        if draft.emulated and values.get("prefill_hint") != "STATIC":
            # The largest power of two that neither exceeds the prompt.
            values.setdefault("prefill_chunk_size", max(16, min(EMULATED_CHUNK, 1 << (prompt.bit_length() - 1))))
        lengths = (prompt, response, values.get("prefill_chunk_size") or 0)
        return Shapes(lengths, prompt, min(prompt + response, draft.installed.context_limit))

    def complete(self, draft: Draft) -> None:
        """Choose the precision and the size of the prefix cache."""
        _complete_precision(draft)
        draft.values.setdefault("prefix_cache_tokens", _prefix_tokens(draft))

    def footprint(self, installed: InstalledModel, plan: EnginePlan) -> Footprint:
        match plan.options:
            case ContinuousOptions(cache_size_gb=fixed) as options:
                kept = options.prefix_cache_tokens if options.enable_prefix_caching else 0
                tokens = max(min(plan.total_limit, _USUAL_TOKENS), kept or 0)
                cache = kv_cache_bytes(installed.path, tokens) or 0
                return Footprint(_CONTINUOUS, fixed * 2**30 or cache)
            case StatefulOptions():
                return Footprint(_STATEFUL, kv_cache_bytes(installed.path, plan.total_limit) or 0)
        return Footprint()

    def lacks(self, options: EngineOptions) -> frozenset[Feature]:
        match options:
            case ContinuousOptions(enable_prefix_caching=False, prompt_lookup=False):
                return NOTHING
            case ContinuousOptions():
                # GenAI 2026.4.1 puts a beam's blocks of the KV cache under wrong hashes: later prompts that begin with
                # the text of a beam would be given them, and be answered wrong.
                return frozenset({"beam_search"})
        return frozenset({"n", "logprobs", "beam_search"})

    def notes(self, installed: InstalledModel, plan: EnginePlan) -> list[str]:
        """What a prompt limit above the usual one costs on the NPU, whose cache is taken whether used or not."""
        if not isinstance(plan.options, StatefulOptions) or plan.lengths[0] <= StatefulOptions().max_prompt_len:
            return []
        size = kv_cache_bytes(installed.path, plan.total_limit)
        taken = "an unknown amount" if size is None else f"{size / 2**20:.0f} MiB"
        return [
            f"max_prompt_len {plan.lengths[0]} makes a static KV cache of {plan.total_limit} tokens: {taken} of memory",
        ]


GENERATE = _Generate()


def prompt_and_response(draft: Draft) -> tuple[int, int]:
    """Tokens of the longest prompt and of its answer in static shapes; the draft's values get the first.

    Raises ConfigurationError for a prompt beyond the model's context.
    """
    defaults, values, limit = StatefulOptions(), draft.values, draft.installed.context_limit
    prompt = values.get("max_prompt_len") or min(draft.installed.max_prompt_len or defaults.max_prompt_len, limit)
    if prompt > limit:
        raise draft.wanted.error("max_prompt_len", f"max_prompt_len is {prompt}, the model's context {limit} tokens")
    values["max_prompt_len"] = prompt
    return prompt, values.get("min_response_len", defaults.min_response_len)


def _prefix_tokens(draft: Draft) -> int:
    """How many tokens are kept for prompts that begin alike, where nothing was set."""
    token = kv_cache_bytes(draft.installed.path, 1)
    if not token:
        return 0
    if fixed := draft.values.get("cache_size_gb"):
        return int(fixed * 2**30 // token)
    if draft.device is not Device.CPU:
        return 0  # a GPU takes the memory at once, and how much it has left is not known here
    share = None if draft.memory is None else int(draft.memory * _PREFIX_SHARE) // token
    return _PREFIX_TOKENS if share is None else min(_PREFIX_TOKENS, share)


def _complete_precision(draft: Draft) -> None:
    """Compute in the precision that the KV cache needs. Raises ConfigurationError for a growing cache in u4.

    OpenVINO's CPU plugin takes f32 and bf16 caches only beside their own precision; a cache in u4 that grows makes
    OpenVINO 2026.4.1 write beyond its memory, which ends the engine.
    """
    values = draft.values
    plugin_config, kept = values.get("plugin_config", {}), values.get("kv_cache_precision")
    if draft.device is not Device.CPU:
        return
    if "u4" in {kept, plugin_config.get("KV_CACHE_PRECISION")} and not values.get("cache_size_gb"):
        raise draft.wanted.error(
            "kv_cache_precision",
            "a KV cache in u4 must have a fixed size on the CPU, since OpenVINO fails when it grows; set "
            "cache_size_gb, or use u8",
        )
    if kept in {"f32", "bf16"}:
        values["plugin_config"] = {"INFERENCE_PRECISION_HINT": kept} | plugin_config


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


def generation_canary(known: GenerationCanary, tokenizer: ChatTokenizer) -> Canary:
    """Return the check that the engine's greedy answer to a known question holds the known words.

    A device that computes garbage raises no error (openvino #38100), so it must pass before a model is ready.
    """

    async def check(engine: JobEngine) -> None:
        prompt = tokenizer.encode_chat((Message("user", known.prompt),))
        job = GenerateJob(
            id=0,
            tokens=np.asarray(prompt, TOKEN_DTYPE).tobytes(),
            max_new_tokens=known.max_new_tokens,
            deadline=time.monotonic() + CANARY_TIMEOUT_S,
        )
        detokenizer = tokenizer.detokenizer()
        async with aclosing(engine.run(job, TokenDelta)) as deltas:
            answer = "".join([detokenizer.push(delta.tokens) async for delta in deltas])
        missing = [word for word in known.expected if word.casefold() not in answer.casefold()]
        if missing:
            raise CanaryFailed(f"the answer lacks {', '.join(map(repr, missing))}")

    return check
