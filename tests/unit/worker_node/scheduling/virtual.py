"""Generation on a CPU or GPU in virtual time: real admission control before the real runner, over a scripted pipeline.

Only what OpenVINO would do is scripted: how long a step takes, and how long an answer gets. A caller is a generator
that yields `Request`s and the seconds until its next one; it is sent the outcome of each.
"""

import heapq
import itertools
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import openvino_genai as genai

from worker_node.core.errors import Overloaded
from worker_node.core.types import Device, ModelKind
from worker_node.engines.protocol import EngineSpec, Failed
from worker_node.scheduling.admission import Admission, AdmissionLimits, TokenCost
from worker_node.tasks.generate import continuous
from worker_node.tasks.generate.messages import GenerateJob, Step

TOKEN = np.ones(1, "<i4").tobytes()


@dataclass(eq=False)
class Request:
    """`prompt` tokens, `answer` tokens that come if `limit` allows; times in virtual seconds."""

    prompt: int
    answer: int = 0
    limit: int = 0
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


EOS = 2


class Handle:
    """GenAI's handle of one generation."""

    def __init__(self, request, tokens):
        self.request, self.part = request, tokens < request.prompt
        # The prefix cache holds what was computed of the prompt before.
        self.left = max(1, tokens - request.computed)
        self.begun = False
        self.unread, self.status = deque(), genai.GenerationStatus.RUNNING

    def cancel(self):
        assert not (self.begun and self.left), "a prompt is cancelled in the middle, perhaps of a block"
        self.status = genai.GenerationStatus.CANCEL

    def get_status(self):
        return self.status

    def can_read(self):
        return bool(self.unread)

    def read(self):
        reason = genai.GenerationFinishReason.NONE
        if len(self.unread) == 1 and self.status == genai.GenerationStatus.FINISHED:
            cut = self.request.answer >= self.request.limit
            reason = genai.GenerationFinishReason.LENGTH if cut else genai.GenerationFinishReason.STOP
        output = SimpleNamespace(generated_ids=[self.unread.popleft()], generated_log_probs=[], finish_reason=reason)
        return {0: output}


class SequenceWorld:
    """The clock, the callers, admission control and one continuous engine: a step takes `step_s` and `token_s` for each
    of its tokens; prompts are split."""

    def __init__(self, *, sequences, step_s, token_s, step_tokens=256, max_outstanding=10**6, max_wait_s=1e6):
        self.now = 0.0
        limits = AdmissionLimits(max_outstanding, sequences, max_wait_s, sequences, step_tokens)
        self.admission = Admission("m", limits, clock=lambda: self.now)
        self.requests = []
        self._due = []
        self._order = itertools.count()
        self._open = {}
        self.jobs = {}
        options = {"max_num_seqs": sequences, "max_num_batched_tokens": step_tokens}
        spec = EngineSpec("m", ModelKind.GENERATION, "/m", Device.CPU, "continuous", options)
        self.step_s, self.token_s, self.step_tokens = step_s, token_s, step_tokens
        self.runner = continuous.ContinuousRunner(spec)
        self.runner._pipeline = self
        self.runner._defaults = None
        self.handles = []
        self.runs = []

    def call(self, caller, at=0.0):
        heapq.heappush(self._due, (at, next(self._order), caller, None))

    def arrive(self):
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
        request.predicted = self.admission.expected_wait(interactive=request.interactive, tokens=request.prompt)
        work = TokenCost(request.prompt, request.limit)
        stack = ExitStack()
        try:
            asked = self.admission.permit(1, request.deadline, work=work, interactive=request.interactive)
            permit = stack.enter_context(asked)
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
        job = GenerateJob(job_id, tokens, request.limit, request.deadline, interactive=request.interactive)
        self.runner.submit(job)

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
            patch.object(continuous, "time", clock),
            patch.object(continuous, "generation_config", lambda job, _defaults, **_options: job),
            patch.object(continuous.ov, "Tensor", lambda array: array),
        ):
            self._loop(until)
            self.draining = True
            while self._open or self.runner.has_work:
                self._loop(until=float("inf"))

    def _loop(self, until):
        while self.now < until:
            self.arrive()
            if self.runner.has_work:
                self.runner.step(self.emit, lambda: None)
                continue
            if not self._due:
                return
            self.now = max(self.now, self._due[0][0])

    # GenAI's pipeline

    def add_request(self, _handle_id, prompt, job):
        request = self.jobs[job.id]
        handle = Handle(request, prompt.shape[1])
        self.handles.append(handle)
        self.runs.append((self.now, job.id))
        return handle

    def has_non_finished_requests(self):
        return bool(self.handles)

    def get_metrics(self):
        running = sum(handle.left == 0 for handle in self.handles)
        return SimpleNamespace(scheduled_requests=running, cache_usage=0.0)

    def step(self):
        self.handles = [h for h in self.handles if h.status == genai.GenerationStatus.RUNNING]
        decoding = [handle for handle in self.handles if handle.left == 0]
        free, ready = max(1, self.step_tokens - len(decoding)), decoding
        tokens = len(decoding)
        for handle in self.handles:
            if handle.left > 0 and free > 0:
                taken = min(free, handle.left)
                handle.left -= taken
                handle.begun = True
                handle.request.computed += taken
                free -= taken
                tokens += taken
                if handle.left == 0:
                    ready = [*ready, handle]
        self.now += self.step_s + self.token_s * tokens
        for handle in ready:
            handle.unread.append(EOS)
            if handle.part:
                handle.status = genai.GenerationStatus.FINISHED
                continue
            handle.request.sent = getattr(handle.request, "sent", 0) + 1
            if handle.request.sent >= min(handle.request.answer, handle.request.limit):
                handle.status = genai.GenerationStatus.FINISHED
        self.handles = [h for h in self.handles if h.status == genai.GenerationStatus.RUNNING]
