"""The order in which prompts are computed, and which of them a pipeline gets next. No device, no clock of its own.

Interactive work goes first. Within a priority the prompt with the fewest pieces left goes first, so that a short one
never waits for a long one to end. A piece is what one step computes; prompts with equally many pieces go in order of
arrival. That alone would starve batch work and long prompts under endless short work, so the oldest prompt of all is
guaranteed a share of the tokens.

A continuous-batching pipeline computes prompts in the order in which it gets them, and one step holds a limited number
of tokens. So it gets no more prompts than fill its next steps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

# Of five tokens that an engine serves while others wait, at least one is guaranteed to the oldest of them.
OTHERS_WEIGHT = 4
# Where a prompt is computed in one go: differences of less than this hardly count beside the answers.
WHOLE_PROMPT_PIECE = 1024
# A generation that runs cannot be interrupted, so batch work never holds all sequences where there are several.
_BATCH_SEQUENCES = 0.75


def batch_sequences(sequences: int) -> int:
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
class PendingPrompt(Generic[J]):
    """A prompt that is not fully computed: `left` of its tokens are still to come, as far as is known.

    `begun` is when its first tokens were computed. `owed`: it goes first by the share of the oldest prompt. `reused` of
    its tokens came from the prefix cache; None where that is not known.
    """

    job: J
    left: int
    begun: float | None = None
    owed: bool = False
    reused: int | None = None

    def pieces(self, piece_tokens: int) -> int:
        return max(1, -(-self.left // piece_tokens))


@dataclass(slots=True)
class JobQueue(Generic[J]):
    """Jobs whose prompt is not computed, in order of arrival. Ranking n of them is O(n log n), all else O(1)."""

    _prompts: dict[int, PendingPrompt[J]] = field(default_factory=dict)
    # What the others have got while the oldest waited, less what the oldest has got for it; in tokens of the others.
    _earned: int = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, job: J) -> None:
        self._prompts[job.id] = PendingPrompt(job, job.prompt_tokens)

    def remove(self, job_id: int) -> PendingPrompt[J] | None:
        """Remove a job whose prompt is computed or whose caller has left; None if it is not queued."""
        oldest = self._oldest()
        prompt = self._prompts.pop(job_id, None)
        if prompt is not None and prompt is oldest and not prompt.owed:
            self._earned = min(self._earned, 0)
        return prompt

    def expired(self, now: float) -> list[PendingPrompt[J]]:
        """Take out and return all jobs whose deadline has passed."""
        late = [prompt for prompt in self._prompts.values() if prompt.job.deadline <= now]
        for prompt in late:
            self.remove(prompt.job.id)
        return late

    def next(self) -> PendingPrompt[J] | None:
        """Remove and return the job to run next, alone and to its end; None if none waits."""
        first = next(iter(self.ranked(WHOLE_PROMPT_PIECE, due=sys.maxsize)), None)
        if first is not None:
            self.remove(first.job.id)
        return first

    def ranked(self, piece_tokens: int, due: int | None = None) -> list[PendingPrompt[J]]:
        """All prompts, the one to compute first at the front.

        The oldest is at the very front, and marked as owed, where its share pays for its next piece, or for `due`.
        """
        due = piece_tokens if due is None else due
        order = sorted(self._prompts.values(), key=lambda each: (not each.job.interactive, each.pieces(piece_tokens)))
        oldest = self._oldest()
        if oldest is None:
            return order
        oldest.owed = oldest is not order[0] and self._earned >= OTHERS_WEIGHT * min(due, oldest.left)
        if oldest.owed:
            order.remove(oldest)
            order.insert(0, oldest)
        return order

    def computed(self, prompt: PendingPrompt[J], tokens: int) -> None:
        """Record that `tokens` of a prompt were computed; it may have left the queue already."""
        # It stays until its answer begins: how much the prefix cache held of it is not known.
        prompt.left = max(1, prompt.left - tokens)
        self.generated(prompt, tokens)

    def generated(self, prompt: PendingPrompt[J], tokens: int) -> None:
        if prompt.owed:
            self._earned -= OTHERS_WEIGHT * tokens
        elif self._oldest() not in {None, prompt}:
            self._earned += tokens

    def _oldest(self) -> PendingPrompt[J] | None:
        return next(iter(self._prompts.values()), None)


# What is handed over ahead: prompts of two steps' tokens and at least two of them, so that a step which ends one prompt
# has another to be filled up with.
_STEPS_AHEAD = 2
_PROMPTS_AHEAD = 2
# A multiple of the tokens of a block of the KV cache, whatever the device.
BLOCK_TOKENS = 32


def choose_prompts(
    ranked: Iterable[PendingPrompt[J]], step_tokens: int, *, places: int, batch_places: int
) -> list[PendingPrompt[J]]:
    """Return the prompts for the next steps, in order; at most `places`, and `batch_places` of batch work.

    One step computes `step_tokens` tokens.

    A prompt that has been begun stays in the pipeline, behind the others: there it keeps its part of the KV cache.
    """
    chosen: list[PendingPrompt[J]] = []
    ahead = 0
    for prompt in ranked:
        if len(chosen) == places:
            break
        if not prompt.job.interactive and not batch_places:
            continue
        enough = len(chosen) >= _PROMPTS_AHEAD and ahead >= _STEPS_AHEAD * step_tokens
        if enough and prompt.begun is None:
            continue
        chosen.append(prompt)
        ahead += prompt.left
        batch_places -= not prompt.job.interactive
    return chosen


def computed_in_step(lefts: Sequence[int], decoding: int, step_tokens: int) -> list[int]:
    """How many tokens of each prompt, in order, a step computes that generates one token for each of `decoding`."""
    free = max(0, step_tokens - decoding)
    taken = []
    for left in lefts:
        tokens = min(free, left)
        taken.append(tokens)
        free -= tokens
    return taken


def end_of_part(prompt: PendingPrompt[J], step_tokens: int, free: int) -> int:
    """How many tokens of a prompt the pipeline gets if the next step has room for `free` more: all, or whole blocks."""
    if prompt.left <= step_tokens:
        return prompt.job.prompt_tokens
    computed = prompt.job.prompt_tokens - prompt.left
    return (computed + max(free, BLOCK_TOKENS)) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(slots=True)
class PrefillMeter:
    """Prompt tokens computed since `take`, and their share of the seconds of steps that generate, too."""

    tokens: int = 0
    seconds: float = 0.0

    def stepped(self, seconds: float, prompt_tokens: int, decoding: int) -> None:
        """A step of `prompt_tokens` and one token for each of `decoding` answers took `seconds`."""
        if not prompt_tokens:
            return
        self.tokens += prompt_tokens
        self.seconds += seconds * prompt_tokens / (prompt_tokens + decoding)

    def spared(self, prompt_tokens: int) -> None:
        """`prompt_tokens` need not be computed: they count as progress that took no time."""
        self.tokens += prompt_tokens

    def take(self) -> tuple[int, float]:
        taken = self.tokens, self.seconds
        self.tokens, self.seconds = 0, 0.0
        return taken
