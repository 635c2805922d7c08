"""Which prompts a continuous-batching pipeline gets next, and how long its steps take. Pure: the caller keeps time.

The pipeline computes prompts in the order in which it gets them, and one step holds a limited number of tokens. So it
gets no more prompts than fill its next steps, in the order of `prompts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker_node.scheduling.prompts import J, Prompt

# What is handed over ahead: prompts of two steps' tokens and at least two of them, so that a step which ends one prompt
# has another to be filled up with.
_STEPS_AHEAD = 2
_PROMPTS_AHEAD = 2
# A multiple of the tokens of a block of the KV cache, whatever the device.
BLOCK_TOKENS = 32


def choose_prompts(ranked: Iterable[Prompt[J]], step_tokens: int, *, places: int, batch_places: int) -> list[Prompt[J]]:
    """Return the prompts for the next steps, in order; at most `places`, and `batch_places` of batch work.

    One step computes `step_tokens` tokens.

    A prompt that has been begun stays in the pipeline, behind the others: there it keeps its part of the KV cache.
    """
    chosen: list[Prompt[J]] = []
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


def end_of_part(prompt: Prompt[J], step_tokens: int, free: int) -> int:
    """How many tokens of a prompt the pipeline gets if the next step has room for `free` more: all, or whole blocks."""
    if prompt.left <= step_tokens:
        return prompt.job.prompt_tokens
    computed = prompt.job.prompt_tokens - prompt.left
    return (computed + max(free, BLOCK_TOKENS)) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(slots=True)
class PrefillMeter:
    """The prompt tokens that were computed since `take`, and the seconds of the steps that they took.

    A step also generates a token for each running answer, which counts like one of a prompt.
    """

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
        """Return tokens and seconds, and reset both."""
        taken = self.tokens, self.seconds
        self.tokens, self.seconds = 0, 0.0
        return taken
