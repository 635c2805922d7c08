"""How long answers decode: the measured rate of an engine, and the lengths of earlier answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker_node.scheduling.lengths import AnswerLengths
from worker_node.scheduling.rates import Rate
from worker_node.scheduling.sequences import AdmittedJob

_MEMORY_TOKENS = 32
# The least share of the time between two tokens that is taken to be decoding.
_LEAST_DECODE = 0.1


@dataclass(slots=True)
class Decoding:
    """New tokens per second and sequence, and how many more of them a job gets."""

    rate: Rate = field(default_factory=lambda: Rate(_MEMORY_TOKENS))
    # By the size of the limit: callers that ask for as much as 4,096 tokens seldom want what those of 16 want.
    _lengths: dict[int, AnswerLengths] = field(default_factory=dict)

    def measured(self, job: AdmittedJob, tokens: int, at: float, prefill_s: float, serving: int) -> None:
        """Take the time since a job's last token, less what the prompts of other jobs took of it.

        `prefill_s` is the time that all prompts have taken so far; `serving` jobs decode side by side.
        """
        elapsed = max(0.0, at - job.heard)
        prompts = prefill_s - job.heard_prefill_s
        self.rate.memory = _MEMORY_TOKENS * max(1, serving)
        self.rate.measured(tokens, max(elapsed - prompts, _LEAST_DECODE * elapsed))

    def grew(self, job: AdmittedJob, tokens: int, at: float, prefill_s: float) -> None:
        """Record that a job got new tokens at `at`."""
        self._answers_like(job).grew(job.generated, tokens)
        job.generated += tokens
        job.heard, job.heard_prefill_s = at, prefill_s

    def ended(self, job: AdmittedJob, *, by_itself: bool) -> None:
        """Record that an answer ended by itself, or was cut at its limit."""
        self._answers_like(job).ended(job.generated, by_itself=by_itself)

    def seconds(self, job: AdmittedJob, *, by_luck: bool = False) -> float:
        """Seconds that a job still decodes, prefills of others apart, as far as is known.

        `by_luck` gives some jobs the time of a long answer and others that of a short one: where several run side by
        side, the first to end counts, and one long answer holds up one sequence only. A mean would hide both.
        """
        rate = self.rate.per_second
        if rate is None:
            return 0.0
        if by_luck and not job.exact:
            return self._answers_like(job).rest_of(job.luck, job.generated, job.limit) / rate
        return self.rest(job) / rate

    def rest(self, job: AdmittedJob) -> float:
        """New tokens that a job is still expected to get."""
        if job.exact:
            return job.limit - job.generated
        return self._answers_like(job).expected_rest(job.generated, job.limit)

    def _answers_like(self, job: AdmittedJob) -> AnswerLengths:
        size = job.limit.bit_length()
        lengths = self._lengths.get(size)
        if lengths is None:
            lengths = self._lengths[size] = AnswerLengths()
        return lengths
