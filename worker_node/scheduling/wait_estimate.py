"""Estimates how long a request waits for an engine: queued tokens by measured rates. No device, no clock of its own.

A job has two phases: the prefill (the tokens of its prompt, or of its texts), for which jobs are taken in turn, and the
decode (new tokens), in which up to `sequences` jobs share the engine. An embedding is a prefill only. The estimate for
batch work does not foresee interactive work that comes later."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker_node.scheduling.prompts import WHOLE_PROMPT_PIECE, batch_sequences, pieces
from worker_node.scheduling.texts import TURN_TOKENS

# How long answers are taken to be before one has ended, and how many of the last answers the mean is of.
_UNKNOWN_ANSWER_TOKENS = 256.0
_MEMORY_ANSWERS = 32
_MEMORY_TOKENS = 32
_MEMORY_STEPS = 16
# The least share of the time between two tokens that is taken to be decoding.
_LEAST_DECODE = 0.1


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


@dataclass(slots=True, eq=False)
class AdmittedJob:
    """An admitted job. `limit` is its most new tokens; with `exact` it uses them all.

    `heard` is when it last got a token, `heard_prefill_s` for how long prompts had been computed by then.
    """

    prefill: int
    limit: int
    exact: bool
    interactive: bool
    generated: int = 0
    heard: float = 0.0
    heard_prefill_s: float = 0.0


@dataclass(slots=True)
class Backlog:
    """All admitted jobs of an engine. An estimate is O(n) in its jobs, all else O(1)."""

    capacity: Capacity
    # Those whose prefill is not complete by priority (False: batch), in order of arrival; then those that decode.
    _pending: dict[bool, dict[AdmittedJob, None]] = field(default_factory=lambda: {True: {}, False: {}})
    _decoding: dict[AdmittedJob, None] = field(default_factory=dict)
    _prefill: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    # Texts of more than one turn, which others do not wait for to their end.
    _large: dict[bool, dict[AdmittedJob, None]] = field(default_factory=lambda: {True: {}, False: {}})
    _prefill_s: float = 0.0
    _prefill_rate: Rate = field(init=False)
    _decode_rate: Rate = field(default_factory=lambda: Rate(_MEMORY_TOKENS))
    # The mean length of answers by the size of their limit: callers that ask for as much as 4,096 tokens seldom want
    # what those of 16 want. Each with the number of answers that it is of.
    _lengths: dict[int, tuple[float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._prefill_rate = Rate(_MEMORY_STEPS * max(64, self.capacity.step_tokens))

    @property
    def jobs(self) -> int:
        """How many jobs there are."""
        return len(self._decoding) + len(self._pending[True]) + len(self._pending[False])

    def tokens(self, *, interactive: bool) -> int:
        """Tokens of this priority that are still to be computed, as far as is expected."""
        decoding = (job for job in self._decoding if job.interactive is interactive)
        new = sum(self._rest(job) for job in (*decoding, *self._pending[interactive]))
        return round(self._prefill[interactive] + new)

    def add(self, job: AdmittedJob) -> None:
        """Add an admitted job."""
        self._pending[job.interactive][job] = None
        self._prefill[job.interactive] += job.prefill
        if self.capacity.sequences is None and job.prefill > TURN_TOKENS:
            self._large[job.interactive][job] = None

    def remove(self, job: AdmittedJob) -> None:
        """Remove a job that ended, complete or not."""
        self._end_prefill(job)
        self._decoding.pop(job, None)

    def restart(self, job: AdmittedJob) -> None:
        """Another engine begins the job: what the first one did of it is lost."""
        self.remove(job)
        job.generated = 0
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

    def progressed(self, job: AdmittedJob, tokens: int, *, at: float) -> None:
        """Record new tokens of a generation at `at`; with the first of them its prompt is computed."""
        if job in self._decoding:
            # The time since its last token, less what the prompts of other jobs took of it.
            elapsed = max(0.0, at - job.heard)
            prompts = self._prefill_s - job.heard_prefill_s
            self._decode_rate.memory = _MEMORY_TOKENS * len(self._decoding)
            self._decode_rate.measured(tokens, max(elapsed - prompts, _LEAST_DECODE * elapsed))
        else:
            self._end_prefill(job)
            self._decoding[job] = None
        job.generated += tokens
        job.heard, job.heard_prefill_s = at, self._prefill_s

    def answered(self, job: AdmittedJob) -> None:
        """Record that an answer ended, by itself or at its limit."""
        mean, count = self._lengths.get(job.limit.bit_length(), (0.0, 0))
        count = min(count + 1, _MEMORY_ANSWERS)
        self._lengths[job.limit.bit_length()] = mean + (job.generated - mean) / count, count

    def own_prefill_s(self, tokens: int) -> float:
        """How long a prefill of this size takes by itself; 0 while that is not known."""
        rate = self._prefill_rate.per_second
        return 0.0 if rate is None else tokens / rate

    def soonest_end(self) -> float | None:
        """Seconds until the first of the jobs ends that the engine has taken up; None while that is not known."""
        jobs = self._decoding or [next(iter(lane)) for lane in self._pending.values() if lane]
        decode = self._decode_rate.per_second
        if (self._prefill_rate if self.capacity.sequences is None else self._decode_rate).per_second is None:
            return None
        return min(
            (
                (0.0 if job in self._decoding else self.own_prefill_s(job.prefill))
                + (self._rest(job) / decode if decode else 0.0)
                for job in jobs
            ),
            default=0.0,
        )

    def wait(self, *, interactive: bool, tokens: int = 0) -> float | None:
        """Seconds until the engine takes up a job of this priority that comes now; None while that is not known.

        Interactive work waits for interactive work and for one step of batch work; a prompt of `tokens` for those that
        do not take more pieces and for one step of the others. An embedding of `tokens` that needs several turns waits
        for as many of others, too.
        """
        sequences = self.capacity.sequences
        if sequences is None:
            return self._prefill_wait(self._texts_ahead(max(tokens, TURN_TOKENS), interactive))
        most = pieces(tokens, self.capacity.piece_tokens)
        ahead = [job for job in self._pending[interactive] if pieces(job.prefill, self.capacity.piece_tokens) <= most]
        if not interactive:
            ahead += self._pending[True]
        prompts = self._prefill_wait(sum(job.prefill for job in ahead))
        decodes = self._decode_wait(ahead, sequences, interactive=interactive)
        # They add up: while the engine takes in prompts, answers hardly grow.
        known = [each for each in (prompts, decodes) if each is not None]
        return sum(known) if any(known) or len(known) == 2 else None

    def _prefill_wait(self, ahead: int) -> float | None:
        """Seconds for so many tokens ahead, and for one step of the others."""
        everything = self._prefill[True] + self._prefill[False]
        if not everything:
            return 0.0
        rate = self._prefill_rate.per_second
        return None if rate is None else (ahead + min(self.capacity.step_tokens, everything - ahead)) / rate

    def _texts_ahead(self, turn: int, interactive: bool) -> int:
        """Tokens that are computed before a job of texts whose own turns take so many tokens."""
        lanes = (True,) if interactive else (True, False)
        return sum(self._prefill[lane] - sum(max(0, job.prefill - turn) for job in self._large[lane]) for lane in lanes)

    def _decode_wait(self, ahead: list[AdmittedJob], sequences: int, *, interactive: bool) -> float | None:
        """Seconds until a sequence is free for a job behind those `ahead`."""
        jobs = [*self._decoding, *ahead]
        excess, shared = len(jobs) - sequences, sequences
        if not interactive and sequences > 1:
            shared = batch_sequences(sequences)
            excess = max(excess, sum(not job.interactive for job in jobs) - shared)
        if excess < 0:
            return 0.0
        rate = self._decode_rate.per_second
        if rate is None:
            return None
        return (excess + 1) * sum(map(self._rest, jobs)) / len(jobs) / shared / rate

    def _rest(self, job: AdmittedJob) -> float:
        """New tokens that a job is still expected to get.

        An answer that has outgrown the mean is expected to get as many tokens again: long answers among short ones are
        known by their length.
        """
        if job.exact:
            return job.limit - job.generated
        mean, _ = self._lengths.get(job.limit.bit_length(), (_UNKNOWN_ANSWER_TOKENS, 0))
        return min(job.limit - job.generated, max(mean - job.generated, job.generated))

    def _end_prefill(self, job: AdmittedJob) -> None:
        """Record that a prefill is complete or was given up."""
        lane = self._pending[job.interactive]
        if job in lane:
            del lane[job]
            self._large[job.interactive].pop(job, None)
            self._prefill[job.interactive] -= job.prefill
