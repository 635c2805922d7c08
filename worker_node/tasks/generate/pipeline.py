"""Open GenAI's continuous-batching pipeline with our options."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai

from worker_node.tasks.generate.continuous_options import ContinuousOptions


def open_pipeline(path: str, device: str, options: ContinuousOptions) -> genai.ContinuousBatchingPipeline:
    """The pipeline of the model in the directory `path`, compiled for `device`. Raises RuntimeError."""
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = options.max_num_batched_tokens
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.cache_size = options.cache_size_gb
    scheduler.dynamic_split_fuse = options.dynamic_split_fuse
    scheduler.enable_prefix_caching = options.enable_prefix_caching
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, device, options.properties())
    if options.enable_prefix_caching and not options.cache_size_gb and options.prefix_cache_tokens:
        _reserve(pipeline, options.prefix_cache_tokens)
    return pipeline


def _reserve(pipeline: genai.ContinuousBatchingPipeline, tokens: int) -> None:
    """Make a growing KV cache begin with blocks for so many tokens: a new prompt takes old blocks before it grows.

    GenAI gives its cache at first what the first requests may need, prompt and answer, even if they are cancelled
    before it computes anything. Nothing is written to the blocks, so the memory is taken when they are first used.
    """
    half = -(-tokens // 2)
    config = pipeline.get_config()
    config.max_new_tokens = half
    pipeline.add_request(0, ov.Tensor(np.zeros((1, half), np.int64)), config).cancel()
    pipeline.step()
