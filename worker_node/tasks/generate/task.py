"""The registration of the task, the options of its engines, and of its models whichever engine runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from worker_node.core.types import Device, ModelKind
from worker_node.devices.npu import MOST_PROMPT_TOKENS
from worker_node.engines.options import BlobOptions, EngineOptions, Option, Options, declare
from worker_node.registry import Task

EnablePrefixCaching = Annotated[bool, Option("keep the KV cache of prompts for those that begin alike")]


@declare
@dataclass(frozen=True, kw_only=True)
class ContinuousOptions(EngineOptions):
    """GenAI's scheduler and its KV cache."""

    title: ClassVar[str] = "Generation on CPU and GPU: continuous batching"
    task: ClassVar[str] = ModelKind.GENERATION
    devices: ClassVar[frozenset[Device]] = frozenset({Device.CPU, Device.GPU})
    runner: ClassVar[str] = "worker_node.tasks.generate.continuous:ContinuousRunner"

    engine: Literal["generation_continuous"] = "generation_continuous"
    max_num_batched_tokens: Annotated[int, Gt(0), Option("tokens of prompts and answers that one step computes")] = 256
    max_num_seqs: Annotated[int, Gt(0), Option("answers that are generated at the same time")] = 256
    cache_size_gb: Annotated[
        int, Ge(0), Option("memory of the KV cache in GB; 0 grows as needed", also=("cache_size",))
    ] = 0
    enable_prefix_caching: EnablePrefixCaching = True
    prefix_cache_tokens: Annotated[
        int | None,
        Ge(0),
        Option(
            "tokens of earlier prompts and answers that are kept for prompts that begin alike, before the KV cache of "
            "cache_size_gb = 0 grows; memory is taken as it fills",
            default="16384 on a CPU, in at most a 16th of the memory budget; what cache_size_gb holds; 0 on a GPU",
        ),
    ] = None
    kv_cache_precision: Annotated[
        Literal["u8", "u4", "f16", "bf16", "f32"] | None,
        Option(
            "type of the values in the KV cache; on a CPU the model is computed in it too if it is f32 or bf16, and u4 "
            "needs cache_size_gb",
            default="the device's own",
        ),
    ] = None
    prompt_lookup: Annotated[
        bool,
        Option(
            "guess the next tokens from the prompt and verify several in one step: faster where answers repeat their "
            "prompt, slower on others"
        ),
    ] = False

    @property
    def caches_prefixes(self) -> bool:
        """Whether blocks of earlier prompts are known to stay in the KV cache."""
        return self.enable_prefix_caching and bool(self.prefix_cache_tokens)

    @property
    def cache_precision(self) -> str | None:
        """The precision that was set for the KV cache; OpenVINO's own name of the setting overrides the node's."""
        return self.plugin_config.get("KV_CACHE_PRECISION", self.kv_cache_precision)

    def properties(self) -> dict[str, Any]:
        """The properties for OpenVINO's plugin of the device."""
        own: dict[str, Any] = {"KV_CACHE_PRECISION": self.kv_cache_precision, "CACHE_DIR": self.cache_dir}
        # GenAI takes this one out before the plugin sees the others.
        own |= {"prompt_lookup": self.prompt_lookup}
        return {name: value for name, value in own.items() if value} | self.plugin_config


@declare
@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Options):
    """What requests may ask for, and what applies when they ask for nothing."""

    title: ClassVar[str] = "Generation"
    task: ClassVar[str] = ModelKind.GENERATION

    max_tokens_limit: Annotated[
        int | None, Gt(0), Option("tokens that a request may ask for in an answer", default="what the context holds")
    ] = None
    sampling_defaults: Annotated[
        Literal["model", "greedy"] | None,
        Option(
            "where a request leaves sampling open: the model's generation_config.json (Ollama's own defaults in its "
            "dialect), or greedy",
            default="the node's",
        ),
    ] = None
    best_of_limit: Annotated[int, Ge(1), Option("answers that a request may ask for, in n or best_of")] = 20
    prewarm: Annotated[
        tuple[str, ...],
        Option(
            "system prompts that are computed for the prefix cache whenever the model has been loaded: texts, or files "
            "whose paths begin with /, ./ or ~/",
            default="none",
            examined=False,
        ),
    ] = ()


MaxPromptLen = Annotated[
    int,
    Gt(0),
    Le(MOST_PROMPT_TOKENS),
    Option(
        "tokens of the longest prompt, up to the model's context; memory grows with it",
        default="1024, or what the catalog says of the model",
    ),
]
MinResponseLen = Annotated[int, Gt(0), Option("tokens that the answer to the longest prompt has room for")]
# All sizes that OpenVINO takes for a chunk.
Chunk = Literal[16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
AttentionHint = Literal["STATIC", "DYNAMIC", "PYRAMID"]


@declare
@dataclass(frozen=True, kw_only=True)
class StatefulOptions(BlobOptions):
    """GenAI's properties for the NPU."""

    title: ClassVar[str] = "Generation on the NPU: static shapes"
    task: ClassVar[str] = ModelKind.GENERATION
    devices: ClassVar[frozenset[Device]] = frozenset({Device.NPU})
    runner: ClassVar[str] = "worker_node.tasks.generate.stateful:StatefulRunner"

    engine: Literal["generation_stateful"] = "generation_stateful"
    max_prompt_len: MaxPromptLen = 1024
    min_response_len: MinResponseLen = 128
    prefill_hint: Annotated[
        Literal["DYNAMIC", "STATIC"] | None,
        Option("compute prompts in chunks (DYNAMIC), or all at once (STATIC)", default="OpenVINO's own"),
    ] = None
    generate_hint: Annotated[
        Literal["FAST_COMPILE", "BEST_PERF"] | None,
        Option("load faster, or generate faster", default="OpenVINO's own"),
    ] = None
    prefill_chunk_size: Annotated[
        Chunk | None,
        Option(
            "tokens of one chunk of a prompt",
            default="1024; a quarter of max_prompt_len where the prefix cache would be useless with more; at most 256 "
            "on an emulated NPU",
        ),
    ] = None
    prefill_attention_hint: Annotated[
        AttentionHint | None,
        Option(
            "how the attention of prompts is compiled; PYRAMID makes long windows faster and smaller",
            default="PYRAMID where max_prompt_len is above 2048, else OpenVINO's own",
        ),
    ] = None
    generate_attention_hint: Annotated[
        AttentionHint | None,
        Option("the same for the tokens of an answer", default="OpenVINO's own"),
    ] = None
    enable_prefix_caching: EnablePrefixCaching = True
    prefix_cache_max_num_blocks: Annotated[
        int | None,
        Ge(1),
        Le(65_536),
        Option(
            "blocks of prefill_chunk_size tokens that the NPU's prefix cache keeps; memory is taken as it fills",
            default="as many as hold 16384 tokens, in at most a 16th of the memory budget",
        ),
    ] = None

    @property
    def caches_prefixes(self) -> bool:
        return self.enable_prefix_caching and self.prefix_cache_max_num_blocks is not None

    def compiled_in(self) -> dict[str, Any]:
        # How many blocks there are follows from the memory of the machine that compiles, and may differ elsewhere.
        found = super().compiled_in()
        return found | {"enable_prefix_caching": self.caches_prefixes, "prefix_cache_max_num_blocks": None}

    def properties(self) -> dict[str, Any]:
        """GenAI's and OpenVINO's properties; None leaves one to them."""
        caches = self.caches_prefixes
        return {
            "MAX_PROMPT_LEN": self.max_prompt_len,
            "MIN_RESPONSE_LEN": self.min_response_len,
            "PREFILL_HINT": self.prefill_hint,
            "GENERATE_HINT": self.generate_hint,
            "NPUW_LLM_PREFILL_CHUNK_SIZE": self.prefill_chunk_size,
            "NPUW_LLM_PREFILL_ATTENTION_HINT": self.prefill_attention_hint,
            "NPUW_LLM_GENERATE_ATTENTION_HINT": self.generate_attention_hint,
            "NPUW_LLM_ENABLE_PREFIX_CACHING": "YES" if caches else None,
            # OpenVINO takes whole chunks from its cache. With smaller blocks it takes a part of one for some prompts
            # (2026.4.1), and their answers are no longer those without the cache.
            "NPUW_LLM_PREFIX_CACHING_BLOCK_SIZE": self.prefill_chunk_size if caches else None,
            "NPUW_LLM_PREFIX_CACHING_MAX_NUM_BLOCKS": self.prefix_cache_max_num_blocks if caches else None,
        }


TASK = Task(
    kind=ModelKind.GENERATION,
    verb="generate",
    capability="chat",
    listed=("completion", "tools"),
    options=(__name__,),
    serving="worker_node.tasks.generate.building:GENERATE",
    api="worker_node.tasks.generate.http:API",
)
