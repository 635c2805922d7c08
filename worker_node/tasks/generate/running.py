"""A job in the continuous-batching pipeline."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import openvino_genai as genai

from worker_node.engines.protocol import TOKEN_DTYPE
from worker_node.scheduling.prompts import Prompt
from worker_node.scheduling.steps import StepLimits
from worker_node.tasks.generate.messages import GenerateJob

_FINISH = {
    genai.GenerationFinishReason.STOP: "stop",
    genai.GenerationFinishReason.LENGTH: "length",
}


@dataclass(slots=True)
class ReadTokens:
    """What the pipeline had ready of an answer; `finish` if these are its last tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None


@dataclass(slots=True)
class Running:
    """A job in the pipeline, with the first `end` tokens of its prompt, of which `left` are to come as far as is known.

    `started` once its prompt is computed and its answer has begun; `answer` are the token ids of it so far.
    """

    prompt: Prompt[GenerateJob]
    handle: genai.GenerationHandle
    end: int
    left: int
    started: bool = False
    answer: list[int] = field(default_factory=list)

    @property
    def job(self) -> GenerateJob:
        """The job."""
        return self.prompt.job

    @property
    def whole(self) -> bool:
        """Whether the pipeline has all of the prompt, so that the answer follows."""
        return self.end == self.job.prompt_tokens

    def read(self) -> ReadTokens:
        """The tokens of the answer that are ready."""
        ready = ReadTokens()
        while self.handle.can_read():
            (output,) = self.handle.read().values()
            ready.tokens += output.generated_ids
            if self.job.logprobs:
                ready.logprobs += output.generated_log_probs
            ready.finish = _FINISH.get(output.finish_reason)
        return ready

    def tokens_computed(self) -> bytes:
        """Prompt and answer, as `TOKEN_DTYPE`, but for the last token: nothing came after it."""
        return self.job.tokens + np.array(self.answer[:-1], TOKEN_DTYPE).tobytes()

    def part_is_computed(self) -> bool:
        """Whether the part of the prompt is computed: the next can follow. Its token is no part of the answer."""
        while self.handle.can_read():
            self.handle.read()
        if self.handle.get_status() != genai.GenerationStatus.FINISHED:
            return False
        self.prompt.left = self.job.prompt_tokens - self.end
        return True


def step_tokens(running: Collection[Running], limits: StepLimits) -> int:
    """How many tokens a step with these computes, at most: as if the prefix cache held nothing of the prompts."""
    prompts = sum(r.end if r.prompt.begun is None else r.left for r in running if not r.started)
    return (min(prompts, limits.tokens) if limits.split else prompts) + len(running)


class AbandonedPrompts:
    """Prompts whose callers have left. With a prefix cache (`in_cache`) those begun are computed to the end."""

    def __init__(self, *, in_cache: bool) -> None:
        self._in_cache = in_cache
        self._handles: dict[int, genai.GenerationHandle] = {}

    @property
    def jobs(self) -> Collection[int]:
        """The ids of those that the pipeline still computes."""
        return self._handles.keys()

    def cancel(self, running: Running) -> None:
        """Take a job out of the pipeline, at once or when its prompt is computed."""
        if self._in_cache and running.prompt.begun is not None and not running.started:
            self._handles[running.job.id] = running.handle
        else:
            running.handle.cancel()

    def cancel_computed(self) -> None:
        """Take out those whose prompts are computed by now."""
        for job_id, handle in list(self._handles.items()):
            if handle.can_read() or handle.get_status() != genai.GenerationStatus.RUNNING:
                handle.cancel()
                del self._handles[job_id]

    def cancel_all(self) -> None:
        """Take out all of them: the pipeline is closed next."""
        for handle in self._handles.values():
            handle.cancel()
