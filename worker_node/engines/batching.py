"""Which texts run together: pure, no device, no clock of its own.

A batch is padded to its longest text, so mixing lengths wastes work (measured: sorted batches are twice as fast
as unsorted ones). The oldest text anchors each batch, so nothing waits for ever; the texts nearest to it in length
fill the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """One text in the queue. `arrived` orders the queue; `length` is in tokens."""

    job_id: int
    row: int
    length: int
    arrived: float
    interactive: bool = True


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`max_tokens` bounds rows times longest (padding counts); `max_rows` bounds the rows.

    A run costs about as much as `run_overhead_tokens` more tokens would, whatever is in it: a text joins a batch only
    if the padding that it causes is less. After `batch_patience_s` in the queue, `batch` work counts as interactive: it
    is slowed, never starved.
    """

    max_tokens: int = 2048
    max_rows: int = 64
    run_overhead_tokens: float = math.inf
    batch_patience_s: float = 1.0


def plan_batch(queue: Sequence[Waiting], limits: BatchLimits, *, free_slots: int, now: float) -> list[int]:
    """Return the indices into `queue` (oldest first) of the texts to run next, shortest first.

    With several slots free the queue is shared out between them instead of all going to the first. A single text
    over `max_tokens` still runs, alone.
    """
    if not queue:
        return []
    urgent = [i for i, w in enumerate(queue) if w.interactive or now - w.arrived >= limits.batch_patience_s]
    candidates = urgent or range(len(queue))
    anchor = queue[candidates[0]].length
    # Among equals in length the older goes first: sorted() is stable and the queue is in order of arrival.
    by_distance = sorted(candidates, key=lambda i: abs(queue[i].length - anchor))
    share = -(-sum(queue[i].length for i in candidates) // max(1, free_slots))
    budget = min(limits.max_tokens, max(share, anchor))
    chosen: list[int] = []
    longest = 0
    for index in by_distance:
        length = queue[index].length
        padded = max(longest, length) * (len(chosen) + 1)
        if chosen and padded - longest * len(chosen) - length > limits.run_overhead_tokens:
            continue
        if chosen and (len(chosen) >= limits.max_rows or padded > budget):
            break
        chosen.append(index)
        longest = max(longest, length)
    return sorted(chosen, key=lambda i: queue[i].length)
