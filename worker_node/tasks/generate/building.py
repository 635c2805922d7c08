"""How generation models are planned, opened and examined: precision and memory of the KV cache, canary."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from worker_node.core.types import NOTHING, Device
from worker_node.engines.options import EngineOptions
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed
from worker_node.engines.protocol import TOKEN_DTYPE, JobEngine
from worker_node.manager.served import ServedModel
from worker_node.models.directory import GenerationCanary, InstalledModel, sampling_defaults
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.serving.run import TaskParts
from worker_node.serving.task import EnginePlan, ServedTask, Target
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.generate.chat_tokenizer import ChatTokenizer
from worker_node.tasks.generate.images import ImageRules
from worker_node.tasks.generate.messages import GenerateJob, TokenDelta
from worker_node.tasks.generate.request import Message
from worker_node.tasks.generate.schemas import SchemaCompiler
from worker_node.tasks.generate.task import ContinuousOptions, GenerationOptions, StatefulOptions

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


@dataclass(eq=False, slots=True)
class GenerationModel(ServedModel):
    """A served generation model; an answer has at most `max_tokens_limit` tokens, a request `best_of_limit` answers.

    `sampling_defaults` are fields of `Sampling` for requests that leave them open; None for greedy ones. `images` is
    None for a model without vision.
    """

    tokenizer: ChatTokenizer
    max_tokens_limit: int = sys.maxsize
    best_of_limit: int = GenerationOptions().best_of_limit
    sampling_defaults: Mapping[str, Any] | None = None
    images: ImageRules | None = None

    def abilities(self) -> Sequence[str]:
        found = {
            "vision": self.images is not None,
            # The engine of a model with vision takes no grammars, which calls of tools are held to.
            "tools": self.tokenizer.takes_tools and self.images is None,
            "thinking": self.tokenizer.can_think,
        }
        return [ability for ability, has in found.items() if has]

    def template(self) -> str:
        return self.tokenizer.chat_template


class _Generate(ServedTask[GenerationModel]):
    """Units at admission are requests."""

    def plan(self, given: EngineOptions, target: Target) -> EnginePlan:
        match given:
            case ContinuousOptions():
                return _continuous(given, target)
            case StatefulOptions():
                return _stateful(given, target)
        raise TypeError(f"{type(given).__name__} are not the options of a generation engine")

    def open(self, installed: InstalledModel, wanted: ModelSettings, settings: NodeSettings) -> GenerationModel:
        limits = wanted.of(GenerationOptions)
        greedy = (limits.sampling_defaults or settings.sampling_defaults) == "greedy"
        return GenerationModel(
            installed,
            ChatTokenizer(installed.path, installed.context_limit),
            limits.max_tokens_limit or sys.maxsize,
            limits.best_of_limit,
            None if greedy else sampling_defaults(installed.path),
        )

    def canary(self, model: GenerationModel, wanted: ModelSettings, plan: EnginePlan) -> Canary | None:
        known = model.installed.canary
        if not isinstance(known, GenerationCanary):
            return None
        tokens = len(model.tokenizer.encode_chat((Message("user", known.prompt),)))
        if tokens > plan.prompt_limit:
            raise wanted.error(
                "max_prompt_len",
                f"max_prompt_len holds prompts of {plan.prompt_limit} tokens, and {tokens} are needed: before the "
                "model is called ready, its engine is examined with a known question",
            )
        return generation_canary(known, model.tokenizer)

    async def start(self, parts: TaskParts) -> None:
        await parts.of(SchemaCompiler).start()


GENERATE = _Generate()


def _continuous(given: ContinuousOptions, target: Target) -> EnginePlan:
    installed, limit = target.installed, target.installed.context_limit
    kept = given.prefix_cache_tokens
    options = replace(
        given,
        plugin_config=_with_precision(given, target),
        prefix_cache_tokens=_prefix_tokens(given, target) if kept is None else kept,
    )
    kept = options.prefix_cache_tokens if options.enable_prefix_caching else 0
    cache = kv_cache_bytes(installed.path, max(min(limit, _USUAL_TOKENS), kept or 0)) or 0
    sequences, step_tokens = options.max_num_seqs, options.max_num_batched_tokens
    # GenAI 2026.4.1 puts a beam's blocks of the KV cache under wrong hashes: later prompts that begin with the text of
    # a beam would be given them, and be answered wrong.
    beams = not options.enable_prefix_caching and not options.prompt_lookup
    return EnginePlan(
        options=options,
        admission=AdmissionLimits(256, parallel=min(64, sequences), sequences=sequences, step_tokens=step_tokens),
        prompt_limit=limit,
        total_limit=limit,
        memory=target.footprint(_CONTINUOUS, options.cache_size_gb * 2**30 or cache),
        lacks=NOTHING if beams else frozenset({"beam_search"}),
    )


def _stateful(given: StatefulOptions, target: Target) -> EnginePlan:
    prompt = prompt_length(given.max_prompt_len, target)
    chunk: Any = given.prefill_chunk_size
    if target.emulated and chunk is None and given.prefill_hint != "STATIC":
        # The largest power of two that neither exceeds the prompt.
        chunk = max(16, min(EMULATED_CHUNK, 1 << (prompt.bit_length() - 1)))
    total = min(prompt + given.min_response_len, target.installed.context_limit)
    cache = kv_cache_bytes(target.installed.path, total)
    notes: tuple[str, ...] = ()
    if prompt > StatefulOptions().max_prompt_len:
        # The NPU's cache is taken whether it is used or not.
        taken = "an unknown amount" if cache is None else f"{cache / 2**20:.0f} MiB"
        notes = (f"max_prompt_len {prompt} makes a static KV cache of {total} tokens: {taken} of memory",)
    return EnginePlan(
        options=replace(given, max_prompt_len=prompt, prefill_chunk_size=chunk),
        admission=AdmissionLimits(64, sequences=1),
        prompt_limit=prompt,
        total_limit=total,
        memory=target.footprint(_STATEFUL, cache or 0),
        lengths=(prompt, given.min_response_len, chunk or 0),
        lacks=frozenset({"n", "logprobs", "beam_search"}),
        notes=notes,
    )


def prompt_length(given: int, target: Target) -> int:
    """Tokens of the longest prompt in static shapes: as set, else as the catalog says of the model, else as declared.

    Raises ConfigurationError for a prompt beyond the model's context.
    """
    limit = target.installed.context_limit
    if "max_prompt_len" not in target.wanted.options:
        return min(target.installed.max_prompt_len or given, limit)
    if given > limit:
        raise target.wanted.error("max_prompt_len", f"max_prompt_len is {given}, the model's context {limit} tokens")
    return given


def _prefix_tokens(given: ContinuousOptions, target: Target) -> int:
    """How many tokens are kept for prompts that begin alike, where nothing was set."""
    token = kv_cache_bytes(target.installed.path, 1)
    if not token:
        return 0
    if given.cache_size_gb:
        return int(given.cache_size_gb * 2**30 // token)
    if target.device is not Device.CPU:
        return 0  # a GPU takes the memory at once, and how much it has left is not known here
    share = None if target.memory is None else int(target.memory * _PREFIX_SHARE) // token
    return _PREFIX_TOKENS if share is None else min(_PREFIX_TOKENS, share)


def _with_precision(given: ContinuousOptions, target: Target) -> dict[str, Any]:
    """The properties that compute in the precision that the KV cache needs.

    Raises ConfigurationError for a growing cache in u4. OpenVINO's CPU plugin takes f32 and bf16 caches only beside
    their own precision; a cache in u4 that grows makes OpenVINO 2026.4.1 write beyond its memory, which ends the
    engine.
    """
    properties, kept = given.plugin_config, given.kv_cache_precision
    if target.device is not Device.CPU:
        return properties
    if "u4" in {kept, properties.get("KV_CACHE_PRECISION")} and not given.cache_size_gb:
        raise target.wanted.error(
            "kv_cache_precision",
            "a KV cache in u4 must have a fixed size on the CPU, since OpenVINO fails when it grows; set "
            "cache_size_gb, or use u8",
        )
    return {"INFERENCE_PRECISION_HINT": kept} | properties if kept in {"f32", "bf16"} else properties


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
        async with aclosing(engine.run(job, TokenDelta)) as deltas:
            answer = tokenizer.decode([token async for delta in deltas for token in delta.tokens])
        missing = [word for word in known.expected if word.casefold() not in answer.casefold()]
        if missing:
            raise CanaryFailed(f"the answer lacks {', '.join(map(repr, missing))}")

    return check
