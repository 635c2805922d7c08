"""From a `GenerateJob` to GenAI's generation configuration: one mapping for all generation engines."""

from __future__ import annotations

import time

import openvino_genai as genai

from worker_node.tasks.generate.messages import GenerateJob

# Guesses of so many tokens, from where the last so many occurred before. GenAI's own figures for it.
_LOOKUP_TOKENS, _LOOKUP_NGRAM = 5, 3


def generation_config(
    job: GenerateJob, defaults: genai.GenerationConfig, *, prompt_lookup: bool = False
) -> genai.GenerationConfig:
    """Return the configuration for one job; from `defaults`, the model's own, only the end tokens are taken.

    `prompt_lookup`: the pipeline was opened for it.
    """
    config = genai.GenerationConfig()
    config.eos_token_id = defaults.eos_token_id
    config.stop_token_ids = defaults.stop_token_ids | set(job.stop_token_ids)
    config.max_new_tokens = job.max_new_tokens
    config.min_new_tokens = min(job.min_new_tokens, job.max_new_tokens)
    config.ignore_eos = job.ignore_eos
    config.presence_penalty = job.presence_penalty
    config.frequency_penalty = job.frequency_penalty
    config.repetition_penalty = job.repetition_penalty
    config.logprobs = int(job.logprobs)
    if job.grammar is not None:
        config.structured_output_config = genai.StructuredOutputConfig(grammar=job.grammar)
    if prompt_lookup:
        config.num_assistant_tokens = _LOOKUP_TOKENS
        config.max_ngram_size = _LOOKUP_NGRAM
    config.do_sample = job.temperature > 0
    if config.do_sample:
        config.temperature = job.temperature
        config.top_p = job.top_p
        if job.top_k:
            config.top_k = job.top_k
        config.min_p = job.min_p
        config.rng_seed = job.seed if job.seed is not None else time.monotonic_ns() & 0x7FFFFFFF
    return config
