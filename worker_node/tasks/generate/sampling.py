"""From a `GenerateJob` to GenAI's generation configuration: one mapping for all generation engines."""

from __future__ import annotations

import time
from typing import Any

import openvino_genai as genai

from worker_node.tasks.generate.messages import GenerateJob

# Tokens to guess, and how many of the last ones must have occurred before. GenAI's own figures.
_LOOKUP_TOKENS, _LOOKUP_NGRAM = 5, 3


def generation_config(
    job: GenerateJob, defaults: genai.GenerationConfig, *, prompt_lookup: bool = False
) -> genai.GenerationConfig:
    """The configuration of one job; of the model's own `defaults` only the end tokens."""
    sampling = job.sampling
    values: dict[str, Any] = {
        "eos_token_id": defaults.eos_token_id,
        "stop_token_ids": defaults.stop_token_ids | set(sampling.stop_token_ids),
        "max_new_tokens": job.max_new_tokens,
        "min_new_tokens": min(sampling.min_tokens, job.max_new_tokens),
        "ignore_eos": sampling.ignore_eos,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": int(sampling.logprobs),
        "do_sample": sampling.temperature > 0,
    }

    if job.grammar is not None:
        values["structured_output_config"] = genai.StructuredOutputConfig(grammar=job.grammar)
    if prompt_lookup:
        values |= {"num_assistant_tokens": _LOOKUP_TOKENS, "max_ngram_size": _LOOKUP_NGRAM}
    if sampling.temperature > 0:
        values |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
        if sampling.top_k:
            values["top_k"] = sampling.top_k
        values["rng_seed"] = sampling.seed if sampling.seed is not None else time.monotonic_ns() & 0x7FFFFFFF
    if sampling.beams:
        values |= {
            "num_beams": sampling.beams,
            "num_return_sequences": sampling.beams,
            "length_penalty": sampling.length_penalty,
        }

    config = genai.GenerationConfig()
    for name, value in values.items():
        setattr(config, name, value)
    return config
