"""Which waiting texts run together. Pure: no device, no clock of its own.

Only texts that are padded to the same length share a run: on a CPU padding costs as much as text, and batches gain less
than padding loses (docs/performance.md). Jobs take turns of `TURN_TOKENS`, in order of arrival: a job of thousands of
texts does not delay later jobs until its end, and small jobs are served first in, first out. The first text in turn is
in every run, so no text waits indefinitely.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from worker_node.scheduling.prompts import OTHERS_WEIGHT

# What a job gets before the others have theirs.
TURN_TOKENS = 4096
# Only the first texts in turn are considered for a run, so that its cost does not grow with the queue.
_WINDOW = 256


class Waiting(NamedTuple):
    """One text in the queue; `length` is in tokens."""

    job_id: int
    row: int
    length: int
    interactive: bool = True


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Texts in rows of one length. `max_tokens` bounds rows times length, `max_rows` the rows.

    Lengths are rounded up to one of `lengths` (ascending), where shapes are static, or else to a multiple of `multiple`
    that is not above `longest_text`.
    """

    max_tokens: int = 2048
    max_rows: int = 64
    multiple: int = 1
    longest_text: int | None = None
    lengths: tuple[int, ...] = ()

    def padded(self, length: int) -> int:
        if self.lengths:
            return next((each for each in self.lengths if length <= each), length)
        padded = -(-length // self.multiple) * self.multiple
        return padded if self.longest_text is None else max(length, min(padded, self.longest_text))

    def computed(self, texts: Sequence[Waiting]) -> int:
        """The tokens of a run of these texts, padding included."""
        return len(texts) * self.padded(texts[0].length)

    def choose(self, window: Sequence[Waiting], share: int) -> list[Waiting]:
        """The texts of a run, the first of the window among them; `share`: how many texts it should take at most."""
        length = self.padded(window[0].length)
        rows = max(1, min(self.max_rows, self.max_tokens // length, share))
        return list(islice((text for text in window if self.padded(text.length) == length), rows))


@dataclass(slots=True)
class _Lane:
    """The waiting texts of one priority, by job. The first job has its turn; `_used` is what it has had of it."""

    tokens: int = 0
    _texts: int = 0
    _used: int = 0
    _jobs: OrderedDict[int, dict[int, Waiting]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return self._texts

    def add(self, text: Waiting) -> None:
        self._jobs.setdefault(text.job_id, {})[text.row] = text
        self.tokens += text.length
        self._texts += 1

    def remove(self, job_id: int, row: int) -> bool:
        text = self._jobs.get(job_id, {}).pop(row, None)
        if text is None:
            return False
        self.tokens -= text.length
        self._texts -= 1
        if not self._jobs[job_id]:
            if job_id == next(iter(self._jobs)):
                self._used = 0
            del self._jobs[job_id]
        return True

    def first(self) -> Waiting:
        return next(iter(next(iter(self._jobs.values())).values()))

    def take(self, limits: BatchLimits, free_slots: int) -> list[Waiting]:
        """Remove and return the texts of the next run; one at least must wait."""
        turn = next(iter(self._jobs))
        window = list(islice(chain.from_iterable(map(dict.values, self._jobs.values())), _WINDOW))
        # With several slots free the texts are shared between them instead of all going to the first.
        chosen = limits.choose(window, -(-self._texts // max(1, free_slots)))
        self._used += sum(text.length for text in chosen if text.job_id == turn)
        for text in chosen:
            self.remove(text.job_id, text.row)
        if self._used >= TURN_TOKENS:
            self._jobs.move_to_end(turn)
            self._used = 0
        return chosen


@dataclass(slots=True)
class TextQueue:
    """Interactive texts go first, and batch texts have a share; a run holds texts of one priority."""

    _interactive: _Lane = field(default_factory=_Lane)
    _batch: _Lane = field(default_factory=_Lane)
    # What interactive texts have got while batch texts waited, less what those have got for it; in tokens of the first.
    _earned: int = 0

    def __len__(self) -> int:
        return len(self._interactive) + len(self._batch)

    def add(self, text: Waiting) -> None:
        (self._interactive if text.interactive else self._batch).add(text)

    def remove(self, job_id: int, row: int) -> bool:
        found = self._interactive.remove(job_id, row) or self._batch.remove(job_id, row)
        self._forget_unused_share()
        return found

    def take(self, limits: BatchLimits, free_slots: int = 1) -> list[Waiting]:
        """Remove and return the texts of the next run; none if none wait. `free_slots`: runs that can start now."""
        if not len(self):
            return []
        both, owed = bool(self._interactive and self._batch), self._owed(limits)
        chosen = self._lane(limits).take(limits, free_slots)
        if both:
            self._earned += limits.computed(chosen) * (-OTHERS_WEIGHT if owed else 1)
        self._forget_unused_share()
        return chosen

    def first(self, limits: BatchLimits) -> Waiting:
        """The text that is in the next run for certain; one at least must wait."""
        return self._lane(limits).first()

    def _lane(self, limits: BatchLimits) -> _Lane:
        return self._batch if self._owed(limits) or not self._interactive else self._interactive

    def _owed(self, limits: BatchLimits) -> bool:
        """Whether it is the turn of batch texts, while both wait."""
        enough = OTHERS_WEIGHT * min(limits.max_tokens, self._batch.tokens)
        return bool(self._interactive and self._batch) and self._earned >= enough

    def _forget_unused_share(self) -> None:
        if not self._batch:
            self._earned = min(self._earned, 0)
