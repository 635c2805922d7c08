"""Admission control of an engine: grant a permit or reject immediately.

Overload is answered with 429 and a Retry-After from the estimated wait; a request whose deadline would pass in the
queue is refused now rather than served late. The wait is queued tokens by measured rates. A job has two phases: the
prefill (the tokens of its prompt, or of its texts), for which jobs take turns, and the decode (new tokens), in which up
to `sequences` jobs share the engine. An embedding is a prefill only. The estimate
does not include jobs that arrive later and go first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from worker_node.core.errors import DeadlineExceeded, Overloaded
from worker_node.scheduling.prompts import WHOLE_PROMPT_PIECE, batch_sequences
from worker_node.scheduling.texts import TURN_TOKENS

_UNKNOWN_RATE_RETRY_S = 1.0
_MAX_RETRY_AFTER_S = 60.0
# A request that is served just too late is wasted work, and in an overload that is every request: so the wait must fit
# the deadline with a margin for an estimate that is too low.
_CAUTION = 1.5
# What batch work leaves free, so that it cannot shut interactive work out.
_BATCH_PLACES = 0.75
# A request for more than this share of the places is treated like batch work there.
_LARGE_REQUEST = 1 / 64
# How long answers are taken to be before one has ended, and how many of the last ones the mean is of, by and large.
_UNKNOWN_ANSWER_TOKENS = 256.0
_MEMORY_ANSWERS = 32
# The least share of the time between two tokens that is taken to be decoding.
_LEAST_DECODE = 0.1
_MEMORY_TOKENS = 256
_MEMORY_STEPS = 16


@dataclass(slots=True)
class Rate:
    """Units of work per second. An observation loses half of its weight with each `memory` units that follow it.

    Time without work changes nothing, so the rate follows the device and not the traffic.
    """

    memory: float
    _units: float = 0.0
    _seconds: float = 0.0

    def measured(self, units: float, seconds: float) -> None:
        """Record that `units` took `seconds`; zero seconds for units computed along with other work."""
        if units <= 0 or seconds < 0:
            return
        kept: float = 0.5 ** (units / self.memory)
        self._units = self._units * kept + units
        self._seconds = self._seconds * kept + seconds

    def seconds(self, units: float) -> float | None:
        """Seconds that `units` take; None before any work took time."""
        return units * self._seconds / self._units if self._seconds > 0 else None


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_outstanding` units (requests; texts, for embeddings) may be queued or running, `parallel` of them at once.

    Nothing is admitted behind a wait of more than `max_wait_s`, whatever its own deadline: a caller who hears so at
    once can ask another node. `sequences` is how many generations run side by side (None: embeddings, which have no
    decode), `step_tokens` what one step or run takes in. `sizes` are the static lengths of an embedding engine,
    ascending; none where shapes are dynamic.
    """

    max_outstanding: int
    parallel: int = 1
    max_wait_s: float = 30.0
    sequences: int | None = None
    step_tokens: int = 1
    sizes: tuple[int, ...] = ()

    def computed_tokens(self, tokens: int) -> int:
        """The tokens that the engine computes for a text of `tokens`: static shapes are padded."""
        return next((size for size in self.sizes if tokens <= size), tokens)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """What a request costs, in tokens: those of its prompt or texts, and its most new ones."""

    prefill: int = 0
    limit: int = 0


class Permit:
    """An admitted request, while the block runs; later estimates are based on its progress.

    Entering raises as `Admission.permit`. `heard` is when it last got a token, `heard_prefill_s` for how long prompts
    had been computed by then.
    """

    __slots__ = ("_admission", "_deadline", "_units", "generated", "heard", "heard_prefill_s", "interactive", "work")

    def __init__(
        self, admission: Admission, units: int, deadline: float, work: TokenCost, *, interactive: bool
    ) -> None:
        self._admission = admission
        self._units = units
        self._deadline = deadline
        self.work = work
        self.interactive = interactive
        self.generated = 0
        self.heard = self.heard_prefill_s = 0.0

    def __enter__(self) -> Self:
        self._admission.check(self._units, self._deadline, work=self.work, interactive=self.interactive)
        self._admission.outstanding += self._units
        self._admission.prefilling[self] = None
        return self

    def __exit__(self, *_error: object) -> None:
        self._admission.outstanding -= self._units
        self._admission.prefilling.pop(self, None)
        self._admission.decoding.pop(self, None)

    def progressed(
        self, tokens: int, *, at: float | None = None, prefilled: tuple[int, float] = (0, 0.0), ended: bool = False
    ) -> None:
        """Record new tokens at `at` (monotonic; None: now); with the first of them its prompt is computed.

        Before that the engine computed the `prefilled` tokens of any prompts, in the seconds given with them. `ended`:
        the answer ended with these tokens, by itself or at its limit.
        """
        admission = self._admission
        admission.measured(*prefilled)
        at = admission.clock() if at is None else at
        if self in admission.decoding:
            # The time since its last token, less what the prompts of other jobs took of it.
            elapsed = max(0.0, at - self.heard)
            prompts = admission.prefill_s - self.heard_prefill_s
            admission.decode_rate.measured(tokens, max(elapsed - prompts, _LEAST_DECODE * elapsed))
        else:
            admission.prefilling.pop(self, None)
            admission.decoding[self] = None
        self.generated += tokens
        self.heard, self.heard_prefill_s = at, admission.prefill_s
        if ended:
            admission.mean_answer += (self.generated - admission.mean_answer) / _MEMORY_ANSWERS

    def measured(self, tokens: int, seconds: float) -> None:
        self._admission.measured(tokens, seconds)


@dataclass(slots=True)
class Admission:
    """Permits for one engine. `what` names it in refusals. An estimate is O(n) in its jobs, all else O(1)."""

    what: str
    limits: AdmissionLimits
    clock: Callable[[], float] = time.monotonic
    outstanding: int = 0
    # Jobs whose prefill is not complete, and those that decode.
    prefilling: dict[Permit, None] = field(default_factory=dict)
    decoding: dict[Permit, None] = field(default_factory=dict)
    # Tokens of an answer, and the seconds in which prompts were computed.
    mean_answer: float = _UNKNOWN_ANSWER_TOKENS
    prefill_s: float = 0.0
    prefill_rate: Rate = field(init=False)
    decode_rate: Rate = field(default_factory=lambda: Rate(_MEMORY_TOKENS))

    def __post_init__(self) -> None:
        self.prefill_rate = Rate(_MEMORY_STEPS * max(64, self.limits.step_tokens))

    @property
    def queue_depth(self) -> int:
        return max(0, self.outstanding - self.limits.parallel)

    def expected_tokens(self, *, interactive: bool) -> int:
        """Tokens of this priority that are still to be computed, as far as is expected."""
        prefill = sum(job.work.prefill for job in self.prefilling if job.interactive is interactive)
        jobs = (job for jobs in (self.prefilling, self.decoding) for job in jobs if job.interactive is interactive)
        return round(prefill + sum(map(self._rest, jobs)))

    def assume(self, prefill: float | None, decode: float | None) -> None:
        """Expect these rates, in tokens per second as they were measured earlier, until the engine's own are known."""
        for rate, assumed in ((self.prefill_rate, prefill), (self.decode_rate, decode)):
            if assumed is not None:
                rate.measured(assumed, 1.0)

    def measured(self, tokens: int, seconds: float) -> None:
        """See `Permit.measured`. A step of a generation that holds next to nothing says nothing of the rate."""
        self.prefill_s += seconds
        if self.limits.sequences is None or 2 * tokens >= self.limits.step_tokens:
            self.prefill_rate.measured(tokens, seconds)

    def expected_wait(self, *, interactive: bool = True, tokens: int = 0) -> float | None:
        """Seconds until work of this priority admitted now would begin to run; None while nothing was measured.

        `tokens` are those of its prompt or texts; without them it is taken for short. Texts take turns, so of another
        job at most a turn, or as much as of its own, is computed before. A prompt waits for those that are not longer,
        and for one step of the others. Interactive work waits for one step of batch work only.
        """
        if not self.outstanding:
            return 0.0
        limits = self.limits
        turn = max(tokens, TURN_TOKENS if limits.sequences is None else max(limits.step_tokens, WHOLE_PROMPT_PIECE))
        ahead = [job for job in self.prefilling if job.interactive or not interactive]
        if limits.sequences is not None:
            ahead = [job for job in ahead if job.work.prefill <= turn]
        first = sum(min(job.work.prefill, turn) for job in ahead)
        others = sum(job.work.prefill for job in self.prefilling) - first
        prefill = self.prefill_rate.seconds(first + min(limits.step_tokens, others)) if first or others else 0.0
        if limits.sequences is None:
            return prefill
        decode = self._decode_wait(ahead, limits.sequences, interactive=interactive)
        # They add up: while the engine takes in prompts, answers hardly grow.
        known = [each for each in (prefill, decode) if each is not None]
        return sum(known) if any(known) or len(known) == 2 else None

    def _decode_wait(self, ahead: list[Permit], sequences: int, *, interactive: bool) -> float | None:
        """Seconds until a sequence is free for a job behind those `ahead`."""
        jobs = [*self.decoding, *ahead]
        excess, shared = len(jobs) - sequences, sequences
        if not interactive and sequences > 1:
            shared = batch_sequences(sequences)
            excess = max(excess, sum(not job.interactive for job in jobs) - shared)
        if excess < 0:
            return 0.0
        return self.decode_rate.seconds((excess + 1) * sum(map(self._rest, jobs)) / len(jobs) / shared)

    def _rest(self, job: Permit) -> float:
        """Expected new tokens: an answer beyond the mean gets as many again, since long answers are few."""
        return min(job.work.limit - job.generated, max(self.mean_answer - job.generated, job.generated))

    def permit(self, units: int, deadline: float, *, work: TokenCost | None = None, interactive: bool = True) -> Permit:
        """Hold a permit for `units` while the block runs. Entering raises Overloaded, DeadlineExceeded."""
        return Permit(self, units, deadline, work or TokenCost(), interactive=interactive)

    @contextmanager
    def waiting(self, units: int, *, interactive: bool = True) -> Iterator[None]:
        """Take places in the queue while a request waits for its engine to be restarted. Raises Overloaded."""
        self._check_places(units, interactive=interactive)
        self.outstanding += units
        try:
            yield
        finally:
            self.outstanding -= units

    def check(self, units: int, deadline: float, *, work: TokenCost | None = None, interactive: bool = True) -> None:
        """Raise what `permit` would, and take nothing. Without `work` only the wait before it is looked at."""
        now = self.clock()
        if deadline <= now:
            raise DeadlineExceeded(f"the deadline passed before {self.what} could begin")
        self._check_places(units, interactive=interactive)
        # By itself a request is given the time that it asks for; behind others, only what it is likely to need.
        tokens = 0 if work is None else work.prefill
        own = self.prefill_rate.seconds(tokens) or 0.0
        acceptable = min(self.limits.max_wait_s, (deadline - now - own) / _CAUTION)
        wait = self.expected_wait(interactive=interactive, tokens=tokens)
        if wait and wait > acceptable:
            most_s, left = self.limits.max_wait_s, deadline - now
            why = (
                f"{most_s:g} s that anything is queued for"
                if acceptable >= most_s
                else f"{max(0.0, acceptable):.1f} s accepted of a request that has {left:.1f} s until its deadline"
            )
            raise Overloaded(
                f"{self.what} is busy: the wait of about {wait:.1f} s is longer than the {why}",
                retry_after=_retry_after(wait),
            )

    def _check_places(self, units: int, *, interactive: bool) -> None:
        places, whose = self.limits.max_outstanding, ""
        if not interactive or units > max(1, places * _LARGE_REQUEST):
            whose = " for large requests" if interactive else " for batch work"
            places = math.ceil(places * _BATCH_PLACES)
        if self.outstanding and self.outstanding + units > places:
            raise Overloaded(
                f"{self.what} is busy: {self.outstanding} of {places} places{whose} are taken",
                retry_after=_retry_after(self.expected_wait(interactive=interactive)),
            )


def _retry_after(wait: float | None) -> float:
    return _UNKNOWN_RATE_RETRY_S if wait is None else min(_MAX_RETRY_AFTER_S, max(0.05, wait))
