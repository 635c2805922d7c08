"""The order in which prompts are computed: two priorities, weighted service. No device, no clock of its own.

Interactive work goes first, with a guaranteed share of the tokens for batch work. Within a priority the prompt with the
fewest pieces left goes first, so that a short one never waits for a long one to end. A piece is what one step computes;
prompts with equally many pieces go in order of arrival. That alone would starve long prompts under endless short work,
so the oldest is guaranteed a share of the tokens, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

# Of four tokens that are computed while the oldest prompt waits, at least one is its own.
_OTHERS_WEIGHT = 3
# Where a prompt is computed in one go: differences of less than this hardly count beside the answers.
WHOLE_PROMPT_PIECE = 1024


def pieces(tokens: int, piece_tokens: int) -> int:
    """How many pieces a prompt takes, at least one."""
    return max(1, -(-tokens // piece_tokens))


class Queued(Protocol):
    """What the queue must know of a job. `deadline` is on the caller's clock; sizes are in tokens."""

    @property
    def id(self) -> int: ...
    @property
    def deadline(self) -> float: ...
    @property
    def interactive(self) -> bool: ...
    @property
    def prompt_tokens(self) -> int: ...


J = TypeVar("J", bound=Queued)


@dataclass(slots=True, eq=False)
class Prompt(Generic[J]):
    """A prompt that is not fully computed: `left` of its tokens are still to come, as far as is known.

    `begun` is when its first tokens were computed. `owed` is set for batch work that goes before interactive work by
    its guaranteed share.
    """

    job: J
    arrival: int
    left: int
    begun: float | None = None
    owed: bool = False


@dataclass(slots=True)
class PromptLine(Generic[J]):
    """The prompts of one priority. Ranking n of them is O(n log n), all else O(1)."""

    _prompts: dict[int, Prompt[J]] = field(default_factory=dict)
    # What the others have got while the oldest waited, less what the oldest has got for it; in tokens of the others.
    _earned: int = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._prompts

    def __iter__(self) -> Iterator[Prompt[J]]:
        return iter(self._prompts.values())

    def add(self, prompt: Prompt[J]) -> None:
        """Add a prompt that waits."""
        self._prompts[prompt.job.id] = prompt

    def remove(self, job_id: int) -> Prompt[J] | None:
        """Remove a prompt that is computed or whose caller has left; None if it is not queued."""
        oldest = next(iter(self._prompts), None)
        prompt = self._prompts.pop(job_id, None)
        if job_id == oldest:
            self._earned = 0
        return prompt

    def ranked(self, piece_tokens: int, due: int) -> list[Prompt[J]]:
        """All prompts, the one to compute first at the front. The oldest needs a share of `due` tokens to go first."""
        order = sorted(self, key=lambda prompt: (pieces(prompt.left, piece_tokens), prompt.arrival))
        oldest = next(iter(self), None)
        if oldest is not None and self._earned >= _OTHERS_WEIGHT * min(due, oldest.left):
            order.remove(oldest)
            order.insert(0, oldest)
        return order

    def computed(self, prompt: Prompt[J], tokens: int) -> None:
        """Record that `tokens` of a prompt were computed; it may have left the queue already."""
        # It stays until its answer begins: how much the prefix cache held of it is not known.
        prompt.left = max(1, prompt.left - tokens)
        if prompt is next(iter(self), None):
            self._earned = max(0, self._earned - _OTHERS_WEIGHT * tokens)
        elif self._prompts:
            self._earned += tokens


# Of ten tokens that an engine serves while both kinds of work wait, at least one is batch work's.
INTERACTIVE_WEIGHT = 9
# A generation that runs cannot be interrupted, so batch work never holds all sequences where there are several.
_BATCH_SEQUENCES = 0.75


def batch_sequences(sequences: int) -> int:
    """How many of the sequences of an engine batch work may hold."""
    return max(1, int(sequences * _BATCH_SEQUENCES))


@dataclass(slots=True)
class BatchCredit:
    """The credit of waiting batch work, which goes first once the credit pays for its next piece of work.

    Work done while nothing else waits costs no credit. `balance` is in interactive tokens, of which INTERACTIVE_WEIGHT
    pay for one of batch work.
    """

    balance: int = 0

    def interactive_served(self, tokens: int) -> None:
        """Record that interactive work got `tokens` while batch work was waiting."""
        self.balance += tokens

    def pays_for(self, tokens: int) -> bool:
        """Whether batch work of this size goes before interactive work now."""
        return self.balance >= tokens * INTERACTIVE_WEIGHT

    def charge(self, tokens: int) -> None:
        """Charge batch work of this size that went before interactive work; a negative number refunds unused tokens."""
        self.balance -= tokens * INTERACTIVE_WEIGHT

    def nothing_waits(self) -> None:
        """Record that no batch work waits any more: its credit is dropped, its debt is kept."""
        self.balance = min(self.balance, 0)


@dataclass(slots=True)
class JobQueue(Generic[J]):
    """Jobs whose prompt is not computed: interactive ones first, the shortest rest first within a priority."""

    credit: BatchCredit = field(default_factory=BatchCredit)
    _interactive: PromptLine[J] = field(default_factory=PromptLine)
    _batch: PromptLine[J] = field(default_factory=PromptLine)
    _arrivals: int = 0

    def __len__(self) -> int:
        return len(self._interactive) + len(self._batch)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._interactive or job_id in self._batch

    def add(self, job: J) -> None:
        """Add a job that waits."""
        self._arrivals += 1
        self._line(job).add(Prompt(job, self._arrivals, job.prompt_tokens))

    def remove(self, job_id: int) -> Prompt[J] | None:
        """Remove a job whose prompt is computed or whose caller has left; None if it is not queued."""
        prompt = self._interactive.remove(job_id) or self._batch.remove(job_id)
        if prompt is not None and not self._batch:
            self.credit.nothing_waits()
        return prompt

    def expired(self, now: float) -> list[Prompt[J]]:
        """Take out and return all jobs whose deadline has passed."""
        late = [prompt for line in (self._interactive, self._batch) for prompt in line if prompt.job.deadline <= now]
        for prompt in late:
            self.remove(prompt.job.id)
        return late

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
        """Record that `tokens` of a prompt were computed."""
        self._line(prompt.job).computed(prompt, tokens)
        self.generated(prompt, tokens)

    def generated(self, prompt: Prompt[J], tokens: int) -> None:
        """Record that the answer to a prompt got `tokens`."""
        if prompt.owed:
            self.credit.charge(tokens)
        elif prompt.job.interactive and self._batch:
            self.credit.interactive_served(tokens)

    def _line(self, job: J) -> PromptLine[J]:
        return self._interactive if job.interactive else self._batch
