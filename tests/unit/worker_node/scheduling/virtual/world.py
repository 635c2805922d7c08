"""The clock, the callers and admission control; the engine is of the subclasses."""

import heapq
import itertools
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from worker_node.core.errors import Overloaded
from worker_node.encoders import dynamic
from worker_node.encoders.jobs import RowJob, RowResult
from worker_node.engines.protocol import Failed, OutcomeBatch
from worker_node.scheduling.admission import Admission, Work
from worker_node.tasks.generate import continuous
from worker_node.tasks.generate.messages import GenerateJob, Step

TOKEN = np.ones(1, "<i4").tobytes()


@dataclass
class Run:
    """A batch that was started, or a generation that was handed over, and what still waited then."""

    at: float
    interactive: bool
    tokens: int
    jobs: set
    interactive_left: int = 0
    batch_left: int = 0


@dataclass(eq=False)
class Request:
    """`prompt` tokens (of each text), `answer` tokens that come if `limit` allows; times in virtual seconds."""

    prompt: int
    answer: int = 0
    limit: int = 0
    texts: int = 0
    interactive: bool = True
    timeout: float = 1e6
    cancel_after: float | None = None
    # What became of it.
    arrived: float = 0.0
    predicted: float | None = None
    started: float | None = None
    ended: float | None = None
    outcome: str | None = None
    generated: int = 0
    computed: int = 0
    last_token: float | None = None

    @property
    def waited(self):
        return self.started - self.arrived

    @property
    def deadline(self):
        return self.arrived + self.timeout


class World:
    """The clock, the callers, admission control and one engine."""

    def __init__(self, limits):
        self.now = 0.0
        self.admission = Admission("m", limits, clock=lambda: self.now)
        self.requests = []
        self._due = []
        self._order = itertools.count()
        self._open = {}
        self.jobs = {}

    def call(self, caller, at=0.0):
        """Start a caller at a time."""
        heapq.heappush(self._due, (at, next(self._order), caller, None))

    def next_arrival(self):
        return self._due[0][0] if self._due else None

    def arrive(self):
        """Let all callers act whose time has come."""
        if self.draining:
            self._due.clear()
        while self._due and self._due[0][0] <= self.now:
            at, _, caller, outcome = heapq.heappop(self._due)
            try:
                action = next(caller) if outcome is None else caller.send(outcome)
            except StopIteration:
                continue
            if isinstance(action, Request):
                self._submit(action, caller)
            else:
                heapq.heappush(self._due, (at + action, next(self._order), caller, "slept"))

    def _submit(self, request, caller):
        request.arrived = self.now
        self.requests.append(request)
        request.predicted = self.admission.expected_wait(
            interactive=request.interactive, tokens=request.prompt * max(1, request.texts)
        )
        work = Work(request.prompt * max(1, request.texts), request.limit)
        stack = ExitStack()
        try:
            permit = stack.enter_context(
                self.admission.permit(
                    max(1, request.texts), request.deadline, work=work, interactive=request.interactive
                )
            )
        except Overloaded as error:
            request.outcome, request.retry_after = "refused", error.retry_after
            heapq.heappush(self._due, (self.now, next(self._order), caller, request))
            return
        job_id = len(self.jobs) + 1
        self.jobs[job_id] = request
        self._open[job_id] = (request, permit, stack, caller)
        if request.cancel_after is not None:
            self.call(self._cancelled(job_id, request.cancel_after), at=self.now)
        tokens = TOKEN * request.prompt
        if request.texts:
            self.runner.submit(
                RowJob(
                    job_id,
                    tokens * request.texts,
                    [request.prompt] * request.texts,
                    request.deadline,
                    request.interactive,
                )
            )
        else:
            self.runner.submit(
                GenerateJob(job_id, tokens, request.limit, request.deadline, interactive=request.interactive)
            )

    def _cancelled(self, job_id, seconds):
        yield seconds
        if job_id in self._open:
            self.runner.cancel(job_id)
            self._end(job_id, "cancelled")

    def emit(self, event):
        if isinstance(event, Step):
            for delta in event.deltas:
                self._delta(delta)
        elif isinstance(event, Failed):
            self._end(event.id, event.code)
        elif isinstance(event, OutcomeBatch):
            for outcome in event.outcomes:
                self.emit(outcome)
        elif isinstance(event, RowResult):
            request, permit, _, _ = self._open[event.id]
            request.started = event.started
            permit.measured(event.measured_tokens, event.measured_s)
            self._end(event.id, "done")

    def _delta(self, delta):
        if delta.id not in self._open:
            return
        request, permit, _, _ = self._open[delta.id]
        request.last_token = delta.at
        if delta.started is not None:
            request.started = delta.started
        prefilled, ended = (delta.prefilled, delta.prefill_s), delta.finish is not None
        permit.progressed(len(delta.tokens), at=delta.at, prefilled=prefilled, ended=ended)
        request.generated += len(delta.tokens)
        if ended:
            self._end(delta.id, "done")

    def _end(self, job_id, outcome):
        request, _, stack, caller = self._open.pop(job_id)
        request.ended, request.outcome = self.now, outcome
        stack.close()
        heapq.heappush(self._due, (self.now, next(self._order), caller, request))

    def run(self, until):
        """Run to the virtual time `until`, then let what is under way end, without any new requests."""
        clock = SimpleNamespace(monotonic=lambda: self.now)
        self.draining = False
        with (
            patch.object(dynamic, "time", clock),
            patch.object(continuous, "time", clock),
        ):
            self._loop(until)
            self.draining = True
            while self._open or self.runner.has_work:
                self._loop(until=float("inf"))
        self.close()

    def _loop(self, until):
        while self.now < until:
            self.arrive()
            if self.runner.has_work:
                self.runner.step(self.emit, lambda: None)
                continue
            times = [at for at in (self.next_arrival(), self.next_finish()) if at is not None]
            if not times:
                return
            self.now = max(self.now, min(times))
            self.wake()

    def next_finish(self):
        return None

    def wake(self):
        pass

    def close(self):
        pass
