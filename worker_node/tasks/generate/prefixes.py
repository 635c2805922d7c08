"""What the prefix cache of a pipeline holds: GenAI does not tell, so the engine counts it from the prompts it gave."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker_node.engines.protocol import TOKEN_BYTES
from worker_node.scheduling.prompts import BLOCK_TOKENS

# Half a million tokens, more than a KV cache of some GB holds.
_REMEMBERED_BLOCKS = 16_384


@dataclass(slots=True)
class PrefixHits:
    """Measures how much of each prompt the prefix cache holds.

    Compares each prompt, block by block, with what was computed before it.

    `hit_tokens` of `asked_tokens` stand in blocks at a prompt's beginning that came before. The cache holds them unless
    it had to make room since: it drops what was used least recently, as this does beyond `remembered` blocks.
    """

    remembered: int = _REMEMBERED_BLOCKS
    block_tokens: int = BLOCK_TOKENS
    asked_tokens: int = 0
    hit_tokens: int = 0
    # A block's key stands for all that comes before it, too. The least recently seen is first.
    _blocks: dict[int, None] = field(default_factory=dict)

    def common(self, tokens: bytes) -> int:
        """How many tokens at the beginning of a prompt (token ids, `TOKEN_DTYPE`) came before, in whole blocks."""
        hit = 0
        for key in self._keys(tokens):
            if key not in self._blocks:
                break
            hit += self.block_tokens
        return hit

    def look_up(self, tokens: bytes, *, most: int | None = None, counted: bool = True) -> int:
        """Count a prompt that is about to be computed; return the tokens that were hit, which are `most` at most."""
        hit = self.common(tokens)
        if most is not None:
            hit = min(hit, most)
        if counted:
            self.asked_tokens += len(tokens) // TOKEN_BYTES
            self.hit_tokens += hit
        return hit

    def computed(self, tokens: bytes) -> None:
        """These were computed, a prompt or it and its answer: from now on others may hit their whole blocks."""
        # From its end, so that the beginning, which others share, is forgotten last.
        for key in reversed(self._keys(tokens)):
            self._blocks.pop(key, None)
            self._blocks[key] = None
        while len(self._blocks) > self.remembered:
            del self._blocks[next(iter(self._blocks))]

    def _keys(self, tokens: bytes) -> list[int]:
        """One key for each whole block, made of it and of all blocks before it."""
        keys: list[int] = []
        key, size = 0, self.block_tokens * TOKEN_BYTES
        for end in range(size, len(tokens) + 1, size):
            key = hash((key, tokens[end - size : end]))
            keys.append(key)
        return keys
