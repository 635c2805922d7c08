"""Predicts how long answers get, learned from those that were generated: pure arithmetic.

Most answers end by themselves long before their limit, and many are still running or were cut. So the estimator learns
what share of the answers that outgrow one length ends before the next, in classes of length that grow geometrically; an
answer counts as an observation as soon as it has left a class. From these shares follows how much longer an answer of
any length is expected to get, also where a few long answers are among many short ones."""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from worker_node.scheduling.prompts import BATCH_SHARE, OLDEST_SHARE, WHOLE_PROMPT_PIECE, batch_sequences, pieces
from worker_node.scheduling.texts import TURN_TOKENS

# Lengths in tokens that begin a class: of one token each at first, then each about 1.4 times as wide as the one before.
_EDGES = (0, 1, 2, 3, *(round(4 * 2 ** (step / 2)) for step in range(30)))
_LAST = len(_EDGES) - 1
# Before anything is known answers are taken to have 256 tokens on average, with the weight of a fifth of an answer.
_PRIOR_TOKENS = 256
_PRIOR_ANSWERS = 0.2
# Observations of more answers than this in one class make the older ones fade.
_MEMORY_ANSWERS = 256
_REFRESH_ANSWERS = 8
_LEAST_SHARE = 1e-6


def _width(index: int) -> int:
    return (_EDGES[index + 1] if index < _LAST else 2 * _EDGES[index]) - _EDGES[index]


def _class_of(length: int) -> int:
    """The class of the last token of an answer: one of as many tokens as an edge has not passed it."""
    return max(0, bisect.bisect_left(_EDGES, length) - 1)


@dataclass(slots=True)
class AnswerLengths:
    """Expected lengths. Learning costs O(1) a token delta, an expectation O(1)."""

    _passed: list[float] = field(default_factory=lambda: [0.0] * len(_EDGES))
    _ended: list[float] = field(default_factory=lambda: [0.0] * len(_EDGES))
    _unread: int = _REFRESH_ANSWERS
    _hazard: list[float] = field(default_factory=list)
    _summed: list[float] = field(default_factory=list)  # the hazard up to each edge
    _rest: list[float] = field(default_factory=list)  # the expected rest at each edge

    def grew(self, length: int, tokens: int) -> None:
        """Record that an answer of `length` tokens got `tokens` more."""
        for index in range(_class_of(length), _class_of(length + tokens)):
            self._passed[index] += 1
            self._fade(index)

    def ended(self, length: int, *, by_itself: bool) -> None:
        """Record that an answer ended with `length` tokens; one that was cut at its limit would have gone on."""
        index = _class_of(length)
        (self._ended if by_itself else self._passed)[index] += 1
        self._unread += _REFRESH_ANSWERS
        self._fade(index)

    def expected_rest(self, length: int, limit: int) -> float:
        """How many more tokens an answer of `length` tokens is expected to get, if it is cut at `limit` in all."""
        if limit <= length:
            return 0.0
        if self._unread >= _REFRESH_ANSWERS:
            self._refresh()
        here, summed_here = self._at(length)
        there, summed_there = self._at(limit)
        return max(0.0, here - math.exp(summed_here - summed_there) * there)

    def rest_of(self, share: float, length: int, limit: int) -> float:
        """How many more tokens at least this share (above 0) of the answers of `length` tokens get, up to `limit`."""
        if self._unread >= _REFRESH_ANSWERS:
            self._refresh()
        summed = self._at(length)[1] - math.log(share)
        index = min(bisect.bisect_right(self._summed, summed) - 1, _LAST)
        return min(limit, _EDGES[index] + (summed - self._summed[index]) / self._hazard[index]) - length

    def _at(self, length: int) -> tuple[float, float]:
        """The expected rest and the summed hazard at a length."""
        index = bisect.bisect_right(_EDGES, length) - 1
        hazard = self._hazard[index]
        summed = self._summed[index] + hazard * (length - _EDGES[index])
        if index == _LAST:
            return 1 / hazard, summed
        survives = math.exp(-hazard * (_EDGES[index + 1] - length))
        return (1 - survives) / hazard + survives * self._rest[index + 1], summed

    def _fade(self, index: int) -> None:
        self._unread += 1
        if self._passed[index] + self._ended[index] > _MEMORY_ANSWERS:
            self._passed[index] /= 2
            self._ended[index] /= 2

    def _refresh(self) -> None:
        self._unread = 0
        self._hazard = []
        self._summed = [0.0]
        for index in range(len(_EDGES)):
            width = _width(index)
            stay = math.exp(-width / _PRIOR_TOKENS)
            passed = self._passed[index] + _PRIOR_ANSWERS * stay
            ended = self._ended[index] + _PRIOR_ANSWERS * (1 - stay)
            hazard = -math.log(max(_LEAST_SHARE, passed / (passed + ended))) / width
            self._hazard.append(hazard)
            self._summed.append(self._summed[-1] + hazard * width)
        rest = [0.0] * len(_EDGES)
        rest[_LAST] = 1 / self._hazard[_LAST]
        for index in reversed(range(_LAST)):
            hazard = self._hazard[index]
            survives = math.exp(-hazard * _width(index))
            rest[index] = (1 - survives) / hazard + survives * rest[index + 1]
        self._rest = rest


# Which of the admitted generations hold one of the engine's sequences, as far as the edge process can know.


@dataclass(slots=True, eq=False)
class AdmittedJob:
    """An admitted job. `limit` is its most new tokens; with `exact` it uses them all."""

    prefill: int
    limit: int
    exact: bool
    interactive: bool
    since: float
    # Where it stands among answers of its kind, from the longest (0) to the shortest (1), as far as anyone can tell.
    luck: float = 0.5
    generated: int = 0
    # When it last got a token, and for how long prompts had been computed by then.
    heard: float = 0.0
    heard_prefill_s: float = 0.0


def lanes() -> dict[bool, OrderedDict[AdmittedJob, None]]:
    """No jobs yet, by priority (False: batch), in order of arrival."""
    return {True: OrderedDict(), False: OrderedDict()}


@dataclass(slots=True)
class Sequences:
    """The jobs that hold the engine's `count` sequences, and those that wait for one. All is O(1), `taken_up` O(n)."""

    count: int
    serving: dict[AdmittedJob, None] = field(default_factory=dict)
    queued: dict[bool, OrderedDict[AdmittedJob, None]] = field(default_factory=lanes)
    _batch: int = 0

    def add(self, job: AdmittedJob, now: float) -> None:
        """Add a job that waits for a sequence; it gets one at once if one is free."""
        self.queued[job.interactive][job] = None
        self._fill(now)

    def remove(self, job: AdmittedJob, now: float) -> None:
        """Remove a job that ended."""
        self.queued[job.interactive].pop(job, None)
        if job in self.serving:
            self._leave(job)
            self._fill(now)

    def taken_up(self, job: AdmittedJob, pending: Mapping[bool, Container[AdmittedJob]]) -> None:
        """The engine turns out to have taken up this job: it has the sequence of the last that is still `pending`."""
        if job not in self.queued[job.interactive]:
            return
        del self.queued[job.interactive][job]
        self._serve(job)
        for other in reversed(self.serving):
            if len(self.serving) <= self.count:
                return
            if other in pending[other.interactive]:
                self._leave(other)
                self.queued[other.interactive][other] = None
                self.queued[other.interactive].move_to_end(other, last=False)
                return

    def _fill(self, now: float) -> None:
        """Give free sequences to the jobs that are next, as the engine does."""
        while len(self.serving) < self.count:
            lane = self.queued[True]
            if not lane and self._batch < batch_sequences(self.count):
                lane = self.queued[False]
            if not lane:
                return
            job, _ = lane.popitem(last=False)
            job.since = now
            self._serve(job)

    def _serve(self, job: AdmittedJob) -> None:
        self.serving[job] = None
        self._batch += not job.interactive

    def _leave(self, job: AdmittedJob) -> None:
        del self.serving[job]
        self._batch -= not job.interactive


# Measured rates of work: pure arithmetic, no clock.


@dataclass(slots=True)
class Rate:
    """Units of work per second. An observation loses half of its weight with each `memory` units that follow it.

    Time without work changes nothing, so the rate follows the device and not the traffic.
    """

    memory: float
    _units: float = 0.0
    _seconds: float = 0.0

    def measured(self, units: float, seconds: float) -> None:
        """Record that so many units took so many seconds; zero seconds for units computed along with other work."""
        if units <= 0 or seconds < 0:
            return
        kept: float = 0.5 ** (units / self.memory)
        self._units = self._units * kept + units
        self._seconds = self._seconds * kept + seconds

    @property
    def per_second(self) -> float | None:
        """The measured rate, or None before any work took time."""
        return self._units / self._seconds if self._seconds > 0 else None


@dataclass(slots=True)
class Load:
    """Seconds of work that arrive per second, over the last `half_life_s`. The clock is the caller's."""

    half_life_s: float = 10.0
    _work_s: float = 0.0
    _weight_s: float = 0.0
    _at: float | None = None

    def arrived(self, seconds: float, now: float) -> None:
        """Record that work of so many seconds arrived."""
        self._advance(now)
        self._work_s += seconds

    def share(self, now: float) -> float:
        """The share of the time that this work takes; above 1 if more arrives than can be done."""
        self._advance(now)
        # As if an idle second had gone before, so that a first arrival is not taken for a flood.
        return self._work_s / (self._weight_s + 1.0)

    def _advance(self, now: float) -> None:
        elapsed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        kept: float = 0.5 ** (elapsed / self.half_life_s)
        self._work_s *= kept
        self._weight_s = self._weight_s * kept + elapsed


# How long answers decode: the measured rate of an engine, and the lengths of earlier answers.

_MEMORY_TOKENS = 32
# The least share of the time between two tokens that is taken to be decoding.
_LEAST_DECODE = 0.1


@dataclass(slots=True)
class Decoding:
    """New tokens per second and sequence, and how many more of them a job gets."""

    rate: Rate = field(default_factory=lambda: Rate(_MEMORY_TOKENS))
    # By the size of the limit: callers that ask for as much as 4,096 tokens seldom want what those of 16 want.
    _lengths: dict[int, AnswerLengths] = field(default_factory=dict)

    def measured(self, job: AdmittedJob, tokens: int, at: float, prefill_s: float, serving: int) -> None:
        """Take the time since a job's last token, less what the prompts of other jobs took of it.

        `prefill_s` is the time that all prompts have taken so far; `serving` jobs decode side by side.
        """
        elapsed = max(0.0, at - job.heard)
        prompts = prefill_s - job.heard_prefill_s
        self.rate.memory = _MEMORY_TOKENS * max(1, serving)
        self.rate.measured(tokens, max(elapsed - prompts, _LEAST_DECODE * elapsed))

    def grew(self, job: AdmittedJob, tokens: int, at: float, prefill_s: float) -> None:
        """Record that a job got new tokens at `at`."""
        self._answers_like(job).grew(job.generated, tokens)
        job.generated += tokens
        job.heard, job.heard_prefill_s = at, prefill_s

    def ended(self, job: AdmittedJob, *, by_itself: bool) -> None:
        """Record that an answer ended by itself, or was cut at its limit."""
        self._answers_like(job).ended(job.generated, by_itself=by_itself)

    def seconds(self, job: AdmittedJob, *, by_luck: bool = False) -> float:
        """Seconds that a job still decodes, prefills of others apart, as far as is known.

        `by_luck` gives some jobs the time of a long answer and others that of a short one: where several run side by
        side, the first to end counts, and one long answer holds up one sequence only. A mean would hide both.
        """
        rate = self.rate.per_second
        if rate is None:
            return 0.0
        if by_luck and not job.exact:
            return self._answers_like(job).rest_of(job.luck, job.generated, job.limit) / rate
        return self.rest(job) / rate

    def rest(self, job: AdmittedJob) -> float:
        """New tokens that a job is still expected to get."""
        if job.exact:
            return job.limit - job.generated
        return self._answers_like(job).expected_rest(job.generated, job.limit)

    def _answers_like(self, job: AdmittedJob) -> AnswerLengths:
        size = job.limit.bit_length()
        lengths = self._lengths.get(size)
        if lengths is None:
            lengths = self._lengths[size] = AnswerLengths()
        return lengths


# Estimates how long the work before an engine takes, in tokens and seconds: one estimator for all engines.
#
# A job has two phases: the prefill (the tokens of its prompt, or of its texts), for which jobs are taken in turn, and
# the
# decode (new tokens), in which up to `sequences` jobs share the engine. An embedding is a prefill only. Prompts are
# computed in the order of `prompts`: those of fewer pieces first. The rates of both phases are measured. No device, no
# clock: the caller supplies times in monotonic seconds.

# A running piece of work is never taken to be over before its end is seen.
_MOST_OF_IT = 0.95
# Progress changes an estimate little in this time: under load it is computed once for all requests.
_FRESH_S = 0.01
_PREFILL_MEMORY_STEPS = 16
_GOLDEN = 0.618034  # its multiples, without their whole part, are spread evenly


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the estimator must know of an engine.

    `sequences` is how many generations run side by side (None: embeddings, which have no decode). `step_tokens` is what
    one step or run takes in; smaller prefills that run alone say nothing of the rate under load. Prompts go before
    those that take more pieces of `piece_tokens`.
    """

    sequences: int | None = None
    step_tokens: int = 1
    piece_tokens: int = WHOLE_PROMPT_PIECE


@dataclass(slots=True)
class Backlog:
    """All admitted jobs of an engine. Adding, progress and removal are O(1); an estimate is O(n log n) in its jobs."""

    capacity: Capacity
    _decoding: Decoding = field(default_factory=Decoding)
    _luck: float = 0.5
    # Not begun to decode, in order of arrival, by priority (False: batch); for embeddings all jobs.
    _pending: dict[bool, OrderedDict[AdmittedJob, None]] = field(default_factory=lanes)
    _prefill: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    # Embeddings of more than one turn, which others do not wait for to their end.
    _large: dict[bool, dict[AdmittedJob, None]] = field(default_factory=lambda: {True: {}, False: {}})
    _sequences: Sequences = field(init=False)
    # Tokens that the oldest pending job of each priority has got by now, if the engine works at the usual rate.
    _under_way: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    _advanced_at: float = 0.0
    _prefill_s: float = 0.0
    _load: Load = field(default_factory=Load)
    # Of interactive prompts alone, by the size of their number of pieces.
    _prompt_loads: dict[int, Load] = field(default_factory=dict)
    _prefill_rate: Rate = field(init=False)
    _estimates: dict[tuple[bool, int], tuple[float, float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sequences = Sequences(self.capacity.sequences or 0)
        self._prefill_rate = Rate(_PREFILL_MEMORY_STEPS * max(64, self.capacity.step_tokens))

    @property
    def jobs(self) -> int:
        """How many jobs there are."""
        serving_only = sum(job not in self._pending[job.interactive] for job in self._sequences.serving)
        return serving_only + len(self._pending[True]) + len(self._pending[False])

    def tokens(self, *, interactive: bool) -> int:
        """Tokens of this priority that are still to be computed, as far as is expected."""
        decode = [*self._sequences.serving, *self._sequences.queued[interactive]]
        new = sum(self._decoding.rest(job) for job in decode if job.interactive is interactive)
        return round(self._prefill[interactive] + new)

    def add(self, job: AdmittedJob) -> None:
        """Add an admitted job."""
        self._advance(job.since)
        self._luck = (self._luck + _GOLDEN) % 1.0 or 1.0
        job.luck = self._luck
        self._pending[job.interactive][job] = None
        self._prefill[job.interactive] += job.prefill
        if self.capacity.sequences is None and job.prefill > TURN_TOKENS:
            self._large[job.interactive][job] = None
        if self.capacity.sequences is not None:
            self._sequences.add(job, job.since)
        if job.interactive:
            self._load.arrived(self._service_s(job), job.since)
            if self.capacity.sequences is not None:
                load = self._prompt_loads.setdefault(self._pieces(job.prefill).bit_length(), Load())
                load.arrived(self.own_prefill_s(job.prefill), job.since)
        self._estimates.clear()

    def remove(self, job: AdmittedJob, now: float) -> None:
        """Remove a job that ended, complete or not."""
        if job in self._pending[job.interactive]:
            self._end_prefill(job, now)
        self._sequences.remove(job, now)
        self._estimates.clear()

    def restart(self, job: AdmittedJob, now: float) -> None:
        """Another engine begins a job anew: what the first one did of it, and its pause, tell nothing."""
        self.remove(job, now)
        job.since, job.generated = now, 0
        self.add(job)

    def measured(self, tokens: int, seconds: float) -> None:
        """Record that the engine computed so many tokens of texts or prompts in so many seconds."""
        self._prefill_s += seconds
        pending = self._prefill[True] + self._prefill[False]
        full = tokens >= self.capacity.step_tokens
        # At the beginning of a burst the others wait for a step that holds next to nothing: it must not be the first
        # that is known of the rate.
        if self._prefill_rate.per_second is not None or 2 * tokens >= self.capacity.step_tokens:
            full = full or pending >= self.capacity.step_tokens
        if self.capacity.sequences is None or full:
            self._prefill_rate.measured(tokens, seconds)
        self._estimates.clear()

    def progressed(self, job: AdmittedJob, tokens: int, *, at: float) -> None:
        """Record new tokens of a generation at `at`; with the first of them its prompt is computed."""
        if job in self._pending[job.interactive]:
            self._end_prefill(job, at)
            self._sequences.taken_up(job, self._pending)
        else:
            self._decoding.measured(job, tokens, at, self._prefill_s, len(self._sequences.serving))
        self._decoding.grew(job, tokens, at, self._prefill_s)
        self._estimates.clear()

    def answered(self, job: AdmittedJob, *, by_itself: bool) -> None:
        """Record that an answer ended by itself, or was cut at its limit."""
        self._decoding.ended(job, by_itself=by_itself)

    def own_prefill_s(self, tokens: int) -> float:
        """How long a prefill of this size takes by itself; 0 while that is not known."""
        rate = self._prefill_rate.per_second
        return 0.0 if rate is None else tokens / rate

    def soonest_end(self) -> float | None:
        """Seconds until the first of the jobs ends that the engine has taken up; None while that is not known."""
        jobs = self._sequences.serving or [next(iter(lane)) for lane in self._pending.values() if lane]
        measured = self._prefill_rate if self.capacity.sequences is None else self._decoding.rate
        return None if measured.per_second is None else min(map(self._service_s, jobs), default=0.0)

    def wait(self, now: float, *, interactive: bool, tokens: int = 0) -> float | None:
        """Seconds until the engine takes up a job of this priority that comes now; None while that is not known.

        Interactive work waits for interactive work, for one step of batch work and for the share of batch work; a
        prompt of `tokens` for those that do not take more steps, for one step of the others and for the share of the
        oldest. An embedding of `tokens` that needs several turns waits for as many of others, too.
        """
        sequences = self.capacity.sequences
        turns = sequences is None and tokens > TURN_TOKENS and bool(self._large[True] or self._large[False])
        key = interactive, 0 if sequences is None else self._pieces(tokens)
        known = None if turns else self._estimates.get(key)
        if known is not None and 0 <= now - known[0] < _FRESH_S:
            return known[1]
        if sequences is None:
            # The round under way is half over, on average, and in the next the others come first.
            wait = self._wait_for_texts(now, max(tokens, TURN_TOKENS) + TURN_TOKENS // 2, interactive=interactive)
            if turns:
                return wait
        else:
            prompts = self._wait_for_prompts(now, key[1], interactive=interactive)
            decodes = self._wait_for_decodes(now, sequences, key[1], interactive=interactive)
            # They add up: while the engine takes in prompts, answers hardly grow.
            known_waits = [each for each in (prompts, decodes) if each is not None]
            wait = sum(known_waits) if any(known_waits) or len(known_waits) == 2 else None
        self._estimates[key] = now, wait
        return wait

    def most_wait(self, *, interactive: bool) -> float | None:
        """What `wait` for texts does not exceed, at next to no cost; None for batch work, and while it is not known."""
        rate = self._prefill_rate.per_second
        if self.capacity.sequences is not None or not interactive or rate is None:
            return None
        return (self._prefill[True] / (1 - BATCH_SHARE) + min(self.capacity.step_tokens, self._prefill[False])) / rate

    def _wait_for_texts(self, now: float, turn: int, *, interactive: bool) -> float | None:
        if not self._prefill[True] and not self._prefill[False]:
            return 0.0
        rate = self._prefill_rate.per_second
        if rate is None:
            return None
        self._advance(now)
        ahead, step = self._ahead(turn, interactive=True), 0
        if interactive:
            step = min(self.capacity.step_tokens, self._prefill[False])
        else:
            ahead += self._ahead(turn, interactive=False)
        return (max(0.0, ahead) / self._share_of_engine(now, interactive=interactive) + step) / rate

    def _ahead(self, turn: int, *, interactive: bool) -> float:
        """Tokens of this priority that are computed before a job whose own turns take so many tokens."""
        others = sum(max(0, job.prefill - turn) for job in self._large[interactive])
        return self._prefill[interactive] - max(others, self._under_way[interactive])

    def _pieces(self, tokens: int) -> int:
        return pieces(tokens, self.capacity.piece_tokens)

    def _wait_for_prompts(self, now: float, most: int, *, interactive: bool) -> float | None:
        """The wait of a prompt of `most` pieces for those that go before it."""
        everything = self._prefill[True] + self._prefill[False]
        if not everything:
            return 0.0
        rate = self._prefill_rate.per_second
        if rate is None:
            return None
        self._advance(now)
        ahead = [job.prefill for job in self._pending[interactive] if self._pieces(job.prefill) <= most]
        left = sum(ahead) - min(self._under_way[interactive], _MOST_OF_IT * max(ahead, default=0))
        share, before = self._share_of_engine(now, interactive=interactive), sum(ahead)
        if interactive:
            share *= self._share_of_prompts(now, most, longer=len(ahead) < len(self._pending[True]))
        else:
            before += self._prefill[True]
            left += self._prefill[True] - self._under_way[True]
        return (left / share + min(self.capacity.step_tokens, everything - before)) / rate

    def _share_of_prompts(self, now: float, most: int, *, longer: bool) -> float:
        """The share of interactive prompts of `most` pieces beside longer ones, and shorter ones that come later."""
        shorter = sum(load.share(now) for size, load in self._prompt_loads.items() if size < most.bit_length())
        return max(OLDEST_SHARE, 1 - shorter) * (1 - OLDEST_SHARE if longer else 1.0)

    def _advance(self, now: float) -> None:
        """Credit the pending jobs with what the engine has done since the last time, interactive work first."""
        elapsed, self._advanced_at = now - self._advanced_at, max(now, self._advanced_at)
        work = max(0.0, elapsed) * (self._prefill_rate.per_second or 0.0)
        for interactive, lane in self._pending.items():
            if not lane:
                continue
            most = work * self._share_of_engine(now, interactive=True) if interactive else work
            most_of_it = _MOST_OF_IT * self._head(lane)
            room = max(0.0, most_of_it - self._under_way[interactive])
            done = min(room, most, work)
            self._under_way[interactive] += done
            work -= done

    def _head(self, lane: OrderedDict[AdmittedJob, None]) -> int:
        """Tokens of the pending job that may be under way for the longest time: which it is, is not known here."""
        if self.capacity.sequences is None:
            return next((job.prefill for job in lane), 0)
        return max((job.prefill for job in lane), default=0)

    def _end_prefill(self, job: AdmittedJob, now: float) -> None:
        """Record that a prefill is complete or was given up."""
        self._advance(now)
        lane = self._pending[job.interactive]
        self._under_way[job.interactive] = max(0.0, self._under_way[job.interactive] - job.prefill)
        del lane[job]
        self._large[job.interactive].pop(job, None)
        self._prefill[job.interactive] -= job.prefill
        if not lane:
            self._under_way[job.interactive] = 0.0

    def _wait_for_decodes(self, now: float, sequences: int, most: int, *, interactive: bool) -> float | None:
        """The wait for a sequence of a job whose prompt has `most` pieces."""
        queued = [job for job in self._sequences.queued[interactive] if self._pieces(job.prefill) <= most]
        ahead, running = queued if interactive else [*self._sequences.queued[True]], [*self._sequences.serving]
        slowed = self._share_of_engine(now, interactive=interactive)
        if not interactive and sequences == 1:
            ahead += queued
        elif not interactive:
            # What batch work may hold, and of that what interactive work leaves.
            most = batch_sequences(sequences)
            ahead, running = queued, [job for job in running if not job.interactive]
            sequences, slowed = most, min(1.0, slowed * sequences / most)
        if not ahead and len(running) < sequences:
            return 0.0
        if self._decoding.rate.per_second is None:
            return None
        free_at = [self._decoding.seconds(job, by_luck=sequences > 1) for job in running]
        heapq.heapify(free_at)
        soonest = free_at[0] if len(free_at) >= sequences else 0.0
        for job in ahead:
            begins = heapq.heappop(free_at) if len(free_at) >= sequences else 0.0
            heapq.heappush(free_at, begins + self._decoding.seconds(job, by_luck=sequences > 1))
        begins = free_at[0] if len(free_at) >= sequences else 0.0
        return soonest + (begins - soonest) / slowed

    def _share_of_engine(self, now: float, *, interactive: bool) -> float:
        """The share of the engine that work of this priority gets, beside the work that goes before it."""
        if interactive:
            return 1 - BATCH_SHARE if self._pending[False] else 1.0
        return max(BATCH_SHARE, 1 - self._load.share(now))

    def _service_s(self, job: AdmittedJob) -> float:
        """Seconds of the whole engine's time that a job still takes, as far as is known."""
        rate, lane = self._prefill_rate.per_second, self._pending[job.interactive]
        prefill = job.prefill if job in lane else 0.0
        if lane and next(iter(lane)) is job:
            prefill = max(0.0, prefill - self._under_way[job.interactive])
        return (prefill / rate if rate else 0.0) + self._decoding.seconds(job) / (self.capacity.sequences or 1)
