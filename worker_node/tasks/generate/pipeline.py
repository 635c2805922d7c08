"""Open GenAI's continuous-batching pipeline with our options."""

from __future__ import annotations

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
    return genai.ContinuousBatchingPipeline(path, scheduler, device, options.properties())
