"""The order in which prompts of one priority are computed. No device, no clock of its own.

The prompt with the fewest pieces left goes first, so that a short one never waits for a long one to end. A piece is
what one step computes; prompts with equally many pieces go in order of arrival. That alone would starve long prompts
under endless short work, so the oldest is guaranteed a share of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

# Of four tokens that are computed while the oldest prompt waits, at least one is its own.
_OTHERS_WEIGHT = 3
OLDEST_SHARE = 1 / (_OTHERS_WEIGHT + 1)
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
        """Record that so many tokens of a prompt were computed; it may have left the queue already."""
        # It stays until its answer begins: how much the prefix cache held of it is not known.
        prompt.left = max(1, prompt.left - tokens)
        if prompt is next(iter(self), None):
            self._earned = max(0, self._earned - _OTHERS_WEIGHT * tokens)
        elif self._prompts:
            self._earned += tokens
