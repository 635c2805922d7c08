"""Which waiting texts run together: two priorities, length buckets. No device, no clock of its own.

A batch is padded to its longest text, so mixing lengths wastes work (measured: sorted batches are twice as fast as
unsorted ones). The first text in turn anchors each batch, so that none waits for ever; the texts nearest to it in
length fill the rest. Jobs take turns of `TURN_TOKENS`, in order of arrival: a job of thousands of texts does not make
later jobs wait for its end, and small jobs are served first in, first out.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from worker_node.scheduling.prompts import BatchCredit

# Shorter texts are rare: even a single word has three tokens, a question has 8 to 24.
_LEAST_TEXT_TOKENS = 8
# What a job gets before the others have theirs.
TURN_TOKENS = 4096


class Waiting(NamedTuple):
    """One text in the queue; `length` is in tokens."""

    job_id: int
    row: int
    length: int
    interactive: bool = True


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`max_tokens` bounds rows times longest (padding counts); `max_rows` bounds the rows.

    A run costs about as much as `run_overhead_tokens` more tokens would, whatever is in it: a text joins a batch only
    if the padding that it causes is less. Runs have lengths that are multiples of `multiple`, and at most
    `longest_text` tokens unless a text has more.
    """

    max_tokens: int = 2048
    max_rows: int = 64
    run_overhead_tokens: float = math.inf
    multiple: int = 1
    longest_text: int | None = None

    def padded(self, length: int) -> int:
        """The length of a run whose longest text has `length` tokens."""
        padded = -(-length // self.multiple) * self.multiple
        return padded if self.longest_text is None else max(length, min(padded, self.longest_text))

    def computed(self, texts: Sequence[Waiting]) -> int:
        """The tokens of a run of these texts, padding included; the longest is the last of them."""
        return len(texts) * self.padded(texts[-1].length)


@dataclass(frozen=True, slots=True)
class PackingLimits:
    """Texts are packed one after another into one row, of one of `lengths` (ascending).

    A run has a fixed overhead of about `run_overhead_tokens` tokens, whatever it holds: the chosen row holds the most
    tokens of texts for its cost.
    """

    lengths: tuple[int, ...]
    run_overhead_tokens: float = 0.0

    @property
    def max_tokens(self) -> int:
        """The longest row."""
        return self.lengths[-1]

    @staticmethod
    def most_texts(length: int) -> int:
        """How many texts a row of this length may hold: each has a vector in the graph, used or not."""
        return max(1, length // _LEAST_TEXT_TOKENS)

    def computed(self, texts: Sequence[Waiting]) -> int:
        """The shortest row that holds these texts, and may hold so many."""
        tokens = sum(text.length for text in texts)
        fits = (each for each in self.lengths if tokens <= each and len(texts) <= self.most_texts(each))
        return next(fits, self.max_tokens)


_Key = tuple[int, int]


@dataclass(slots=True)
class _Turns:
    """When the texts of a job come: its `tokens` so far, of which the first TURN_TOKENS are in round `first`."""

    first: int
    tokens: int = 0
    waiting: int = 0


@dataclass(slots=True)
class LengthBuckets:
    """The waiting texts of one priority, by their turns and by length.

    Adding and removing a text costs O(log n) comparisons; `choose` costs that for each text chosen, whatever waits.
    """

    tokens: int = 0
    # The round of each text, and the texts of each round in order of arrival.
    _texts: dict[_Key, int] = field(default_factory=dict)
    _rounds: dict[int, OrderedDict[_Key, Waiting]] = field(default_factory=dict)
    _jobs: dict[int, _Turns] = field(default_factory=dict)
    _round: int = 0
    _buckets: dict[int, OrderedDict[_Key, Waiting]] = field(default_factory=dict)
    _lengths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text: Waiting) -> None:
        """Add a text that waits."""
        key = (text.job_id, text.row)
        bucket = self._buckets.get(text.length)
        if bucket is None:
            bucket = self._buckets[text.length] = OrderedDict()
            bisect.insort(self._lengths, text.length)
        bucket[key] = text
        # After the round under way: jobs that keep coming would keep that round from its end, and all others waiting.
        job = self._jobs.setdefault(text.job_id, _Turns(self._round + 1))
        turn = job.first + job.tokens // TURN_TOKENS
        job.tokens += text.length
        job.waiting += 1
        self._texts[key] = turn
        self._rounds.setdefault(turn, OrderedDict())[key] = text
        self.tokens += text.length

    def remove(self, job_id: int, row: int) -> bool:
        """Remove a text; False if it is not queued."""
        turn = self._texts.pop((job_id, row), None)
        if turn is None:
            return False
        text = self._rounds[turn].pop((job_id, row))
        if not self._rounds[turn]:
            del self._rounds[turn]
        job = self._jobs[job_id]
        job.waiting -= 1
        if not job.waiting:
            del self._jobs[job_id]
        bucket = self._buckets[text.length]
        del bucket[job_id, row]
        if not bucket:
            del self._buckets[text.length]
            del self._lengths[bisect.bisect_left(self._lengths, text.length)]
        self.tokens -= text.length
        return True

    def choose(self, limits: BatchLimits, free_slots: int) -> list[Waiting]:
        """Return the text whose turn it is and those that best run with it, shortest first; one at least must wait.

        With several slots free the texts are shared out between them instead of all going to the first. A single text
        over `max_tokens` runs alone.
        """
        anchor = self._next()
        budget, padded = limits.max_tokens, limits.padded
        if free_slots > 1:
            budget = min(budget, max(-(-self.tokens // free_slots), padded(anchor.length)))
        position = bisect.bisect_left(self._lengths, anchor.length)
        shorter = self._in_order(range(position, -1, -1), anchor)
        longer = self._in_order(range(position + 1, len(self._lengths)), anchor)
        chosen, longest = [anchor], padded(anchor.length)
        below, above = next(shorter, None), next(longer, None)
        while len(chosen) < limits.max_rows:
            rows = len(chosen)
            # A side that does not fit now will not fit later: batches only grow, and its next texts are further away.
            if below is not None and not (
                longest - padded(below.length) <= limits.run_overhead_tokens and longest * (rows + 1) <= budget
            ):
                below = None
            if above is not None and not (
                (padded(above.length) - longest) * rows <= limits.run_overhead_tokens
                and padded(above.length) * (rows + 1) <= budget
            ):
                above = None
            if below is not None and (above is None or anchor.length - below.length <= above.length - anchor.length):
                chosen.append(below)
                below = next(shorter, None)
            elif above is not None:
                chosen.append(above)
                longest = padded(above.length)
                above = next(longer, None)
            else:
                break
        return sorted(chosen, key=lambda text: text.length)

    def pack(self, limits: PackingLimits) -> list[Waiting]:
        """Return the text whose turn it is and those that fill its row best, shortest first; one at least must wait."""
        anchor = self._next()
        best, most = [anchor], 0.0
        for length in limits.lengths:
            if length < anchor.length:
                continue
            row = self._fill(anchor, length, limits.most_texts(length))
            gain = sum(text.length for text in row) / (length + limits.run_overhead_tokens)
            if gain > most:
                best, most = row, gain
            if len(row) == len(self):
                break
        return sorted(best, key=lambda text: text.length)

    def _fill(self, anchor: Waiting, length: int, texts: int) -> list[Waiting]:
        """The anchor, and the longest text that fits beside it again and again."""
        row, free = [anchor], length - anchor.length
        position = bisect.bisect_right(self._lengths, free)
        while position and len(row) < texts:
            size = self._lengths[position - 1]
            others = (text for text in self._buckets[size].values() if text is not anchor)
            chosen = list(itertools.islice(others, min(free // size, texts - len(row))))
            row += chosen
            free -= size * len(chosen)
            position = min(position - 1, bisect.bisect_right(self._lengths, free))
        return row

    def _next(self) -> Waiting:
        """The text whose turn it is."""
        self._round = min(self._rounds)
        return next(iter(self._rounds[self._round].values()))

    def _in_order(self, positions: Iterable[int], anchor: Waiting) -> Iterator[Waiting]:
        """The texts of the lengths at these positions, the older first among equals, without the anchor."""
        for position in positions:
            yield from (text for text in self._buckets[self._lengths[position]].values() if text is not anchor)


@dataclass(slots=True)
class TextQueue:
    """All waiting texts of an embedding engine. A batch holds texts of one priority."""

    credit: BatchCredit = field(default_factory=BatchCredit)
    _interactive: LengthBuckets = field(default_factory=LengthBuckets)
    _batch: LengthBuckets = field(default_factory=LengthBuckets)

    def __len__(self) -> int:
        return len(self._interactive) + len(self._batch)

    def add(self, text: Waiting) -> None:
        """Add a text that waits."""
        (self._interactive if text.interactive else self._batch).add(text)

    def remove(self, job_id: int, row: int) -> bool:
        """Remove a text; False if it is not queued."""
        found = self._interactive.remove(job_id, row) or self._batch.remove(job_id, row)
        self._tidy()
        return found

    def take(self, limits: BatchLimits | PackingLimits, free_slots: int = 1) -> list[Waiting]:
        """Remove and return the texts of the next run, shortest first; may be none. A packed row fills one slot."""
        if not len(self):
            return []
        both = bool(len(self._interactive)) and bool(len(self._batch))
        owed = both and self.credit.pays_for(min(limits.max_tokens, self._batch.tokens))
        lane = self._batch if owed or not len(self._interactive) else self._interactive
        chosen = lane.pack(limits) if isinstance(limits, PackingLimits) else lane.choose(limits, free_slots)
        for text in chosen:
            lane.remove(text.job_id, text.row)
        padded = limits.computed(chosen)
        if owed:
            self.credit.charge(padded)
        elif both:
            self.credit.interactive_served(padded)
        self._tidy()
        return chosen

    def _tidy(self) -> None:
        if not len(self._batch):
            self.credit.nothing_waits()
