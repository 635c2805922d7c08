"""A job in the continuous-batching pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import openvino_genai as genai

from worker_node.scheduling.prompts import Prompt
from worker_node.tasks.generate.messages import GenerateJob


@dataclass(slots=True)
class Running:
    """A job in the pipeline, with the first `end` tokens of its prompt, of which `left` are to come as far as is known.

    `started` once its prompt is computed and its answer has begun.
    """

    prompt: Prompt[GenerateJob]
    handle: genai.GenerationHandle
    end: int
    left: int
    started: bool = False

    @property
    def job(self) -> GenerateJob:
        """What is to be done."""
        return self.prompt.job

    @property
    def whole(self) -> bool:
        """Whether the pipeline has all of the prompt, so that the answer follows."""
        return self.end == self.job.prompt_tokens
