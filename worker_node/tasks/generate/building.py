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

from worker_node.core.errors import BadRequest, ContextLengthExceeded
from worker_node.core.types import NOTHING, Device
from worker_node.engines.options import EngineOptions
from worker_node.engines.process import CANARY_TIMEOUT_S, Canary, CanaryFailed, Prewarm
from worker_node.engines.protocol import TOKEN_DTYPE, JobEngine
from worker_node.manager.served import ServedModel
from worker_node.models.directory import GenerationCanary, InstalledModel, sampling_defaults
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.scheduling.prompts import BLOCK_TOKENS
from worker_node.serving.run import TaskParts
from worker_node.serving.task import EnginePlan, ServedTask, Target
from worker_node.settings import ModelSettings, NodeSettings
from worker_node.tasks.generate.chat_tokenizer import ChatTokenizer
from worker_node.tasks.generate.images import ImageRules
from worker_node.tasks.generate.messages import GenerateJob, Sampling, TokenDelta
from worker_node.tasks.generate.request import Message
from worker_node.tasks.generate.schemas import SchemaCompiler
from worker_node.tasks.generate.task import ContinuousOptions, GenerationOptions, StatefulOptions

# With chunks of 256 a short prompt's first token takes a third of the time on the emulated NPU. What it does to a real
# one could not be measured, so there OpenVINO's own default stands.
EMULATED_CHUNK = 256
_OPENVINO_CHUNK = 1024
_LEAST_CHUNK = 64
# Longer windows are compiled with pyramid attention, as in Intel's own demos of long prompts.
_PLAIN_WINDOW = 2048
# Measured on the emulated NPU: the prefill and the generation have their own KV caches, and work on copies.
_CACHE_COPIES = 4
_BLOCK_SIZE = "NPUW_LLM_PREFIX_CACHING_BLOCK_SIZE"
# Resident bytes for each byte of weights, measured on Linux with OpenVINO 2026.4: the CPU plugin repacks int4 and int8.
_CONTINUOUS, _STATEFUL = 2.0, 2.5
# What is kept for prompts that begin alike: some long prompts and the traffic between their repetitions.
_PREFIX_TOKENS = 16_384
# NPUs for which Intel's compiler refuses the graph of a prompt's second chunk (docs/npu-compiled.md).
_ONE_CHUNK = frozenset({"3720"})
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
        tokenizer = model.tokenizer
        prompt = tokenizer.encode_chat((Message("user", known.prompt),))
        if len(prompt) > plan.prompt_limit:
            raise wanted.error(
                "max_prompt_len",
                f"max_prompt_len holds prompts of {plan.prompt_limit} tokens, and {len(prompt)} are needed: before the "
                "model is called ready, its engine is examined with a known question",
            )

        async def check(engine: JobEngine) -> None:
            # A device that computes garbage raises no error (openvino #38100).
            deadline = time.monotonic() + CANARY_TIMEOUT_S
            job = GenerateJob(0, _encoded(prompt), known.max_new_tokens, deadline, internal=True)
            async with aclosing(engine.run(job, TokenDelta)) as deltas:
                answer = tokenizer.decode([token async for delta in deltas for token in delta.tokens])
            missing = [word for word in known.expected if word.casefold() not in answer.casefold()]
            if missing:
                raise CanaryFailed(f"the answer lacks {', '.join(map(repr, missing))}")

        return check

    def prewarm(
        self, model: GenerationModel, wanted: ModelSettings, plan: EnginePlan
    ) -> tuple[Prewarm | None, tuple[str, ...]]:
        options = plan.options
        caches = isinstance(options, ContinuousOptions | StatefulOptions) and options.caches_prefixes
        chunk = options.prefill_chunk_size if isinstance(options, StatefulOptions) else None
        step = (chunk or BLOCK_TOKENS) if caches else 0
        prompts: list[bytes] = []
        # Notes are public in /health: they name the place of a text, not what it says.
        notes: list[str] = []
        for place, value in enumerate(wanted.of(GenerationOptions).prewarm):
            tokens = _system_prompt(model.tokenizer, prewarm_text(value, wanted), wanted)
            kept = len(tokens) // step * step if step else 0
            if not kept or len(tokens) >= plan.prompt_limit:
                why = (
                    f"it has {len(tokens)} tokens, and this engine keeps prompts of {step} to {plan.prompt_limit - 1}"
                    if step
                    else "this engine has no prefix cache"
                )
                notes.append(f"prewarm[{place}] is ignored: {why}")
                continue
            # The prefill of an NPU cannot be interrupted, so that requests wait for one chunk at most.
            ends = range(chunk, kept + 1, chunk) if chunk else [kept]
            prompts += [_encoded(tokens[:end]) for end in ends]

        async def prewarm(engine: JobEngine) -> None:
            for prompt in prompts:
                deadline = time.monotonic() + _PREWARM_TIMEOUT_S
                job = GenerateJob(0, prompt, 1, deadline, Sampling(ignore_eos=True), interactive=False, internal=True)
                async with aclosing(engine.run(job, TokenDelta)) as deltas:
                    async for _ in deltas:
                        pass

        return prewarm if prompts else None, tuple(notes)

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
    held = max(min(limit, _USUAL_TOKENS), kept or 0)
    cache = kv_cache_bytes(installed.path, held, given.cache_precision) or 0
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
    refused = target.architecture in _ONE_CHUNK and "enable_prefix_caching" not in target.wanted.options
    if refused:
        several = prompt > _OPENVINO_CHUNK and given.prefill_chunk_size is None
        hint = given.prefill_hint or ("STATIC" if several else None)
        given = replace(given, enable_prefix_caching=False, prefill_hint=hint)
    options = replace(
        given,
        max_prompt_len=prompt,
        prefill_chunk_size=_chunk(given, prompt, emulated=target.emulated),
        prefill_attention_hint=given.prefill_attention_hint or ("PYRAMID" if prompt > _PLAIN_WINDOW else None),
    )

    options, notes = _with_prefix_cache(options, target)
    if refused:
        notes = (
            "there is no prefix cache: Intel's compiler refuses prompts in several chunks for NPU "
            f"{target.architecture}; enable_prefix_caching = true tries it with this model",
        )

    path = target.installed.path
    total = min(prompt + given.min_response_len, target.installed.context_limit)
    window = _window_bytes(path, options, total)
    if prompt > StatefulOptions().max_prompt_len:
        # The NPU's cache is taken whether it is used or not.
        taken = "an unknown amount" if window is None else f"{window / 2**20:.0f} MiB"
        notes = (*notes, f"max_prompt_len {prompt} makes static shapes of {total} tokens: {taken} of memory")

    chunk, blocks = options.prefill_chunk_size or 0, options.prefix_cache_max_num_blocks or 0
    kept = kv_cache_bytes(path, chunk * blocks) or 0
    return EnginePlan(
        options=options,
        admission=AdmissionLimits(64, sequences=1),
        prompt_limit=prompt,
        total_limit=total,
        memory=target.footprint(_STATEFUL, (window or 0) + kept),
        lengths=(prompt, given.min_response_len, chunk, blocks),
        lacks=frozenset({"n", "logprobs", "beam_search"}),
        notes=notes,
    )


def _chunk(given: StatefulOptions, prompt: int, *, emulated: bool) -> Any:
    """Tokens of a chunk of a prompt; None leaves it to OpenVINO, as for a prompt that is computed all at once.

    The prefix cache keeps whole chunks, and the last chunk of the window is always computed: so it holds something
    only if the window has several.
    """
    if given.prefill_chunk_size is not None or given.prefill_hint == "STATIC":
        return given.prefill_chunk_size
    if not emulated and not given.enable_prefix_caching:
        return None
    chunk = EMULATED_CHUNK if emulated else _OPENVINO_CHUNK
    if given.enable_prefix_caching:
        chunk = min(chunk, max(_LEAST_CHUNK, _power_of_two(prompt // 4)))
    return max(16, min(chunk, _power_of_two(prompt)))


def _power_of_two(most: int) -> int:
    """The largest that is not above `most`; 1 for less."""
    return 1 << max(0, most.bit_length() - 1)


def _with_prefix_cache(given: StatefulOptions, target: Target) -> tuple[StatefulOptions, tuple[str, ...]]:
    """The options with the size of the prefix cache, or without a cache where it can hold nothing, and why."""
    off = replace(given, enable_prefix_caching=False, prefix_cache_max_num_blocks=None)
    if not given.enable_prefix_caching:
        return off, ()
    chunk = given.prefill_chunk_size
    if chunk is None or chunk >= given.max_prompt_len:
        problem = f"prompts of at most {given.max_prompt_len} tokens are computed in one chunk"
        asked = {"enable_prefix_caching", "prefill_chunk_size", "prefix_cache_max_num_blocks"}
        return off, (f"there is no prefix cache: {problem}",) if asked & set(target.wanted.options) else ()
    config, notes = dict(given.plugin_config), tuple[str, ...]()
    if config.pop(_BLOCK_SIZE, chunk) != chunk:
        notes = (f"{_BLOCK_SIZE} is ignored: blocks are whole chunks, of {chunk} tokens",)
    blocks = given.prefix_cache_max_num_blocks
    if blocks is None:
        # A power of two: little changes of the memory budget do not make the model be compiled again.
        token = kv_cache_bytes(target.installed.path, 1)
        blocks = _power_of_two(_affordable_tokens(target, token) // chunk)
    return replace(given, prefix_cache_max_num_blocks=blocks, plugin_config=config), notes


def _affordable_tokens(target: Target, token: int | None) -> int:
    """How many tokens of earlier prompts, of `token` bytes each, are kept where nothing was set."""
    if not token or target.memory is None:
        return _PREFIX_TOKENS
    return min(_PREFIX_TOKENS, int(target.memory * _PREFIX_SHARE) // token)


def _window_bytes(path: Path, options: StatefulOptions, total: int) -> int | None:
    """Bytes that static shapes of `total` tokens take; None where `config.json` does not tell the model's shape."""
    cache = kv_cache_bytes(path, total)
    if cache is None:
        return None
    scores = 0
    if options.prefill_attention_hint in {None, "STATIC"}:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"]) * int(config["num_hidden_layers"])
        scores = 4 * heads * (options.prefill_chunk_size or _OPENVINO_CHUNK) * options.max_prompt_len
    return _CACHE_COPIES * cache + scores


def prompt_length(given: int, target: Target) -> int:
    """As set, else as the catalog says of the model, else as declared. Raises ConfigurationError."""
    limit = target.installed.context_limit
    if "max_prompt_len" not in target.wanted.options:
        return min(target.installed.max_prompt_len or given, limit)
    if given > limit:
        raise target.wanted.error("max_prompt_len", f"max_prompt_len is {given}, the model's context {limit} tokens")
    return given


def _prefix_tokens(given: ContinuousOptions, target: Target) -> int:
    """How many tokens are kept for prompts that begin alike, where nothing was set."""
    token = kv_cache_bytes(target.installed.path, 1, given.cache_precision)
    if not token:
        return 0
    if given.cache_size_gb:
        return int(given.cache_size_gb * 2**30 // token)
    # A GPU takes the memory at once, and how much it has left is not known here.
    return _affordable_tokens(target, token) if target.device is Device.CPU else 0


def _with_precision(given: ContinuousOptions, target: Target) -> dict[str, Any]:
    """The properties that compute in the precision that the KV cache needs.

    Raises ConfigurationError for a growing cache in u4. OpenVINO's CPU plugin takes f32 and bf16 caches only beside
    their own precision; a cache in u4 that grows makes OpenVINO 2026.4.1 write beyond its memory, which ends the
    engine.
    """
    properties, kept = given.plugin_config, given.kv_cache_precision
    if target.device is not Device.CPU:
        return properties
    if given.cache_precision == "u4" and not given.cache_size_gb:
        raise target.wanted.error(
            "kv_cache_precision",
            "a KV cache in u4 must have a fixed size on the CPU, since OpenVINO fails when it grows; set "
            "cache_size_gb, or use u8",
        )
    return {"INFERENCE_PRECISION_HINT": kept} | properties if kept in {"f32", "bf16"} else properties


_BITS = {"f32": 32, "u8": 8, "u4": 4}
# The NPU keeps keys and values in f16, and no other device's own precision takes more.
_OWN_BITS = 16


def kv_cache_bytes(directory: Path, tokens: int, precision: str | None = None) -> int | None:
    """Bytes for keys and values of `tokens` tokens; None where `config.json` does not tell the model's shape.

    They are in `precision`, None for the device's own; scales are not counted.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
        layers = int(config["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
    bits = _BITS.get(precision or "", _OWN_BITS)
    return 2 * layers * kv_heads * head_size * bits * tokens // 8


def _encoded(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, TOKEN_DTYPE).tobytes()


# What is computed for the prefix cache when a model has been loaded.

_PREWARM_TIMEOUT_S = 600.0
_PREWARM_BYTES = 1_000_000


def prewarm_text(value: str, wanted: ModelSettings) -> str:
    """The text that a value of `prewarm` is, or names. Raises ConfigurationError."""
    if not value.startswith(("/", "./", "../", "~/")) and not Path(value).is_absolute():
        if len(value.split()) < 2:
            got = f"{value!r}: one word" if value.strip() else "an empty text"
            raise wanted.error("prewarm", f"prewarm must be texts, or paths that begin with /, ./ or ~/; got {got}")
        return value
    path = Path(value).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(_PREWARM_BYTES + 1)
        if len(content) > _PREWARM_BYTES:
            raise ValueError(f"it has more than {_PREWARM_BYTES} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise wanted.error("prewarm", f"prewarm names {value}, which cannot be read: {why}") from None


def _system_prompt(tokenizer: ChatTokenizer, text: str, wanted: ModelSettings) -> list[int]:
    """The tokens with which conversations begin whose system prompt is the text. Raises ConfigurationError."""
    try:
        if not tokenizer.chat_template:
            return tokenizer.encode_prompt(text)
        # Up to where two questions part: templates end a system prompt in their own way.
        chats = [tokenizer.encode_chat((Message("system", text), Message("user", word))) for word in ("a", "Who")]
    except (BadRequest, ContextLengthExceeded) as error:
        raise wanted.error("prewarm", f"prewarm has a text that is no system prompt of it: {error.message}") from None
    same = [one == other for one, other in zip(*chats, strict=False)]
    return chats[0][: same.index(False) if False in same else len(same)]
