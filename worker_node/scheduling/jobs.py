"""The queue of prompts before a generation engine: two priorities, weighted service. No device, no clock of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Generic

from worker_node.scheduling.deadlines import Deadlines
from worker_node.scheduling.prompts import WHOLE_PROMPT_PIECE, J, Prompt, PromptLine
from worker_node.scheduling.shares import BatchCredit


@dataclass(slots=True)
class JobQueue(Generic[J]):
    """Jobs whose prompt is not computed: interactive ones first, the shortest rest first within a priority."""

    credit: BatchCredit = field(default_factory=BatchCredit)
    _interactive: PromptLine[J] = field(default_factory=PromptLine)
    _batch: PromptLine[J] = field(default_factory=PromptLine)
    _deadlines: Deadlines = field(default_factory=Deadlines)
    _arrivals: int = 0

    def __len__(self) -> int:
        return len(self._interactive) + len(self._batch)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._interactive or job_id in self._batch

    def add(self, job: J) -> None:
        """Add a job that waits."""
        self._arrivals += 1
        self._line(job).add(Prompt(job, self._arrivals, job.prompt_tokens))
        self._deadlines.add(job.id, job.deadline)

    def remove(self, job_id: int) -> Prompt[J] | None:
        """Remove a job whose prompt is computed or whose caller has left; None if it is not queued."""
        prompt = self._interactive.remove(job_id) or self._batch.remove(job_id)
        if prompt is not None:
            if not self._batch:
                self.credit.nothing_waits()
            self._deadlines.compact(self, len(self))
        return prompt

    def expired(self, now: float) -> list[Prompt[J]]:
        """Take out and return all jobs whose deadline has passed."""
        late = [self.remove(job_id) for job_id in self._deadlines.due(now, self)]
        return [prompt for prompt in late if prompt is not None]

    def ranked(self, step_tokens: int) -> list[Prompt[J]]:
        """All prompts, the one to compute first at the front; one step computes `step_tokens` of it.

        A batch prompt is at the very front, and marked as owed, where the share of batch work pays for its next step.
        """
        return self._ranked(step_tokens, due=step_tokens)

    def next(self, piece_tokens: int = WHOLE_PROMPT_PIECE) -> Prompt[J] | None:
        """Remove and return the job to run next, alone and to its end; None if none waits."""
        first = next(iter(self._ranked(piece_tokens, due=sys.maxsize)), None)
        if first is not None:
            self.remove(first.job.id)
        return first

    def _ranked(self, piece_tokens: int, due: int) -> list[Prompt[J]]:
        interactive, batch = self._interactive.ranked(piece_tokens, due), self._batch.ranked(piece_tokens, due)
        if not batch or not interactive:
            return interactive or batch
        first = batch[0]
        first.owed = self.credit.pays_for(min(due, first.left))
        return [first, *interactive, *batch[1:]] if first.owed else [*interactive, *batch]

    def computed(self, prompt: Prompt[J], tokens: int) -> None:
        """Record that so many tokens of a prompt were computed."""
        self._line(prompt.job).computed(prompt, tokens)
        self.generated(prompt, tokens)

    def generated(self, prompt: Prompt[J], tokens: int) -> None:
        """Record that the answer to a prompt got so many tokens."""
        if prompt.owed:
            self.credit.charge(tokens)
        elif prompt.job.interactive and self._batch:
            self.credit.interactive_served(tokens)

    def _line(self, job: J) -> PromptLine[J]:
        return self._interactive if job.interactive else self._batch
