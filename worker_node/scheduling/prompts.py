"""The order in which prompts are computed: two priorities, and a share for the oldest. No device, no clock of its own.

Interactive work goes first. Within a priority the prompt with the fewest pieces left goes first, so that a short one
never waits for a long one to end. A piece is what one step computes; prompts with equally many pieces go in order of
arrival. That alone would starve batch work and long prompts under endless short work, so the oldest prompt of all is
guaranteed a share of the tokens."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

# Of five tokens that an engine serves while others wait, at least one is guaranteed to the oldest of them.
OTHERS_WEIGHT = 4
# Where a prompt is computed in one go: differences of less than this hardly count beside the answers.
WHOLE_PROMPT_PIECE = 1024
# A generation that runs cannot be interrupted, so batch work never holds all sequences where there are several.
_BATCH_SEQUENCES = 0.75


def batch_sequences(sequences: int) -> int:
    """How many of the sequences of an engine batch work may hold."""
    return max(1, int(sequences * _BATCH_SEQUENCES))


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

    `begun` is when its first tokens were computed. `owed`: it goes first by the share of the oldest prompt.
    """

    job: J
    left: int
    begun: float | None = None
    owed: bool = False

    def pieces(self, piece_tokens: int) -> int:
        """How many pieces are left, at least one."""
        return max(1, -(-self.left // piece_tokens))


@dataclass(slots=True)
class JobQueue(Generic[J]):
    """Jobs whose prompt is not computed, in order of arrival. Ranking n of them is O(n log n), all else O(1)."""

    _prompts: dict[int, Prompt[J]] = field(default_factory=dict)
    # What the others have got while the oldest waited, less what the oldest has got for it; in tokens of the others.
    _earned: int = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._prompts

    def add(self, job: J) -> None:
        """Add a job that waits."""
        self._prompts[job.id] = Prompt(job, job.prompt_tokens)

    def remove(self, job_id: int) -> Prompt[J] | None:
        """Remove a job whose prompt is computed or whose caller has left; None if it is not queued."""
        oldest = self._oldest()
        prompt = self._prompts.pop(job_id, None)
        if prompt is not None and prompt is oldest and not prompt.owed:
            self._earned = min(self._earned, 0)
        return prompt

    def expired(self, now: float) -> list[Prompt[J]]:
        """Take out and return all jobs whose deadline has passed."""
        late = [prompt for prompt in self._prompts.values() if prompt.job.deadline <= now]
        for prompt in late:
            self.remove(prompt.job.id)
        return late

    def ranked(self, step_tokens: int) -> list[Prompt[J]]:
        """All prompts, the one to compute first at the front; one step computes `step_tokens` of it.

        The oldest is at the very front, and marked as owed, where its share pays for its next step.
        """
        return self._ranked(step_tokens, due=step_tokens)

    def next(self, piece_tokens: int = WHOLE_PROMPT_PIECE) -> Prompt[J] | None:
        """Remove and return the job to run next, alone and to its end; None if none waits."""
        first = next(iter(self._ranked(piece_tokens, due=sys.maxsize)), None)
        if first is not None:
            self.remove(first.job.id)
        return first

    def _ranked(self, piece_tokens: int, due: int) -> list[Prompt[J]]:
        order = sorted(self._prompts.values(), key=lambda each: (not each.job.interactive, each.pieces(piece_tokens)))
        oldest = self._oldest()
        if oldest is None:
            return order
        oldest.owed = oldest is not order[0] and self._earned >= OTHERS_WEIGHT * min(due, oldest.left)
        if oldest.owed:
            order.remove(oldest)
            order.insert(0, oldest)
        return order

    def computed(self, prompt: Prompt[J], tokens: int) -> None:
        """Record that `tokens` of a prompt were computed; it may have left the queue already."""
        # It stays until its answer begins: how much the prefix cache held of it is not known.
        prompt.left = max(1, prompt.left - tokens)
        self.generated(prompt, tokens)

    def generated(self, prompt: Prompt[J], tokens: int) -> None:
        """Record that the answer to a prompt got `tokens`."""
        if prompt.owed:
            self._earned -= OTHERS_WEIGHT * tokens
        elif self._oldest() not in {None, prompt}:
            self._earned += tokens

    def _oldest(self) -> Prompt[J] | None:
        return next(iter(self._prompts.values()), None)
