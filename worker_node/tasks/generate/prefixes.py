"""How much of each prompt hits a pipeline's prefix cache: GenAI does not report it, so the engine counts it."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker_node.engines.protocol import TOKEN_BYTES
from worker_node.scheduling.prompts import BLOCK_TOKENS

# Half a million tokens, more than a KV cache of some GB holds.
_REMEMBERED_BLOCKS = 16_384


@dataclass(slots=True)
class PrefixHits:
    """Measures how much of each prompt the prefix cache of continuous batching holds.

    Compares each prompt, block by block, with what was computed before it.

    `hit_tokens` of `asked_tokens` stand in blocks at a prompt's beginning that came before. The cache holds them unless
    it had to make room since: it drops what was used least recently, as this does beyond `remembered` blocks.
    """

    remembered: int = _REMEMBERED_BLOCKS
    asked_tokens: int = 0
    hit_tokens: int = 0
    # A block's key stands for all that comes before it, too. The least recently seen is first.
    _blocks: dict[int, None] = field(default_factory=dict)

    def common(self, tokens: bytes) -> int:
        """How many tokens at the beginning of a prompt (token ids, `TOKEN_DTYPE`) came before, in whole blocks."""
        hit = 0
        for key in _keys(tokens, BLOCK_TOKENS):
            if key not in self._blocks:
                break
            hit += BLOCK_TOKENS
        return hit

    def look_up(self, tokens: bytes, *, counted: bool = True) -> int:
        """Count a prompt that is about to be computed; return the tokens that were hit."""
        hit = self.common(tokens)
        if counted:
            self.asked_tokens += len(tokens) // TOKEN_BYTES
            self.hit_tokens += hit
        return hit

    def computed(self, tokens: bytes) -> None:
        """These were computed, a prompt or it and its answer: from now on others may hit their whole blocks."""
        # From its end, so that the beginning, which others share, is forgotten last.
        for key in reversed(_keys(tokens, BLOCK_TOKENS)):
            self._blocks.pop(key, None)
            self._blocks[key] = None
        while len(self._blocks) > self.remembered:
            del self._blocks[next(iter(self._blocks))]


@dataclass(slots=True)
class _Chunk:
    parent: int
    children: set[int] = field(default_factory=set)


@dataclass(slots=True)
class ChunkCache:
    """Follows OpenVINO's prefix cache on the NPU, of `most` chunks: what that of 2026.4.1 holds, this has.

    It keeps the whole chunks of each prompt, and takes them from the cache but for the prompt's last one and the
    window's. To make room it drops the least recently used chunk that has no followers, or was used since it got them.
    A chunk that finds no room, or whose predecessor is not there, is not kept. A test compares it with the CPU time of
    prompts on the emulated NPU.
    """

    most: int
    chunk: int
    window: int
    asked_tokens: int = 0
    hit_tokens: int = 0
    _blocks: dict[int, _Chunk] = field(default_factory=dict)
    # The least recently used is first.
    _evictable: dict[int, None] = field(default_factory=dict)

    def look_up(self, tokens: bytes, *, counted: bool = True) -> int:
        """Take a prompt's beginning from the cache; return how many tokens it has."""
        count, hit = len(tokens) // TOKEN_BYTES, 0
        # The last chunk of the prompt, and of the window, is computed in any case.
        most = min(count - 1, self.window - 1) // self.chunk * self.chunk
        for key in _keys(tokens, self.chunk):
            if key not in self._blocks:
                break
            self._use(key)
            if hit + self.chunk > most:
                break
            hit += self.chunk
        if counted:
            self.asked_tokens += count
            self.hit_tokens += hit
        return hit

    def computed(self, tokens: bytes, hit: int) -> None:
        """A prompt was computed, of which `hit` tokens came from the cache."""
        keys = _keys(tokens, self.chunk)
        for at in range(hit // self.chunk, len(keys)):
            self._keep(keys[at], keys[at - 1] if at else 0)

    def _keep(self, key: int, before: int) -> None:
        if key in self._blocks:
            self._use(key)
            return
        parent = self._blocks.get(before)
        if parent is None and before:
            return
        if parent is not None:
            parent.children.add(key)
            self._evictable.pop(before, None)
        if len(self._blocks) >= self.most and not self._drop_one():
            self._leave(before, key)
            return
        self._blocks[key] = _Chunk(before)
        self._use(key)

    def _use(self, key: int) -> None:
        self._evictable.pop(key, None)
        self._evictable[key] = None

    def _drop_one(self) -> bool:
        key = next(iter(self._evictable), None)
        if key is None:
            return False
        del self._evictable[key]
        self._leave(self._blocks.pop(key).parent, key)
        return True

    def _leave(self, before: int, key: int) -> None:
        """A chunk does not follow the one before it any more, which can be dropped if none else does."""
        parent = self._blocks.get(before)
        if parent is not None:
            parent.children.discard(key)
            if not parent.children:
                self._use(before)


def _keys(tokens: bytes, block_tokens: int) -> list[int]:
    """One key for each whole block, made of it and of all blocks before it; 0 is none."""
    keys: list[int] = []
    key, size = 0, block_tokens * TOKEN_BYTES
    for end in range(size, len(tokens) + 1, size):
        key = hash((key, tokens[end - size : end])) or 1
        keys.append(key)
    return keys
