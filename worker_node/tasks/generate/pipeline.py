"""Open GenAI's continuous-batching pipeline with our options."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai

from worker_node.tasks.generate.continuous_options import ContinuousOptions
from worker_node.tasks.generate.messages import GenerateJob
from worker_node.tasks.generate.sampling import generation_config


def open_pipeline(path: str, device: str, options: ContinuousOptions) -> genai.ContinuousBatchingPipeline:
    """The pipeline of the model in the directory `path`, compiled for `device`. Raises RuntimeError."""
    if device == "CPU" and options.kv_cache_precision == "bf16":
        _require_bf16()
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = options.max_num_batched_tokens
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.cache_size = options.cache_size_gb
    scheduler.dynamic_split_fuse = options.dynamic_split_fuse
    scheduler.enable_prefix_caching = options.enable_prefix_caching
    properties = options.properties()
    if options.draft_model is not None:
        # GenAI divides a cache of a fixed size between the two.
        properties["draft_model"] = genai.draft_model(options.draft_model, device, **properties)
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, device, properties)
    if options.enable_prefix_caching and not options.cache_size_gb and options.prefix_cache_tokens:
        _reserve(pipeline, options)
    return pipeline


def _require_bf16() -> None:
    """Raise RuntimeError where the CPU does not compute in bf16: the first request would fail in native code."""
    if "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise RuntimeError("kv_cache_precision = bf16 needs a CPU that computes in bf16; set f16, u8 or u4")


def job_config(
    job: GenerateJob, defaults: genai.GenerationConfig, options: ContinuousOptions
) -> genai.GenerationConfig:
    """The configuration for one job in the pipeline of these options. Raises RuntimeError."""
    draft_tokens = 0 if options.draft_model is None else options.draft_tokens
    return generation_config(job, defaults, prompt_lookup=options.prompt_lookup, draft_tokens=draft_tokens)


def _reserve(pipeline: genai.ContinuousBatchingPipeline, options: ContinuousOptions) -> None:
    """Make a growing KV cache begin with blocks for `prefix_cache_tokens`: a prompt takes old blocks before it grows.

    GenAI gives its cache at first what the first requests may need, prompt and answer, even if they are cancelled
    before it computes anything. Nothing is written to the blocks, so the memory is taken when they are first used.
    """
    half = -(-(options.prefix_cache_tokens or 0) // 2)
    job = GenerateJob(0, b"", half, deadline=0.0, ignore_eos=True)
    config = job_config(job, pipeline.get_config(), options)
    pipeline.add_request(0, ov.Tensor(np.zeros((1, half), np.int64)), config).cancel()
    pipeline.step()
