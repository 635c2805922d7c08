"""A node's scheduling in virtual time: real admission control before the real engine runners, over scripted devices.

Only what OpenVINO would do is scripted: how long a run or a step takes, and how long an answer gets. A caller is a
generator that yields `Request`s and the seconds until its next one; it is sent the outcome of each.
"""

import heapq
import itertools
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import openvino_genai as genai

from worker_node.domain import Device, ModelKind
from worker_node.engines.messages import EngineSpec, Failed
from worker_node.errors import Overloaded
from worker_node.scheduling.admission import Admission, AdmissionLimits, Work
from worker_node.scheduling.backlog import Capacity
from worker_node.tasks.embed import dynamic
from worker_node.tasks.embed.messages import Embedded, EmbedJob
from worker_node.tasks.generate import continuous, stateful
from worker_node.tasks.generate.messages import GenerateJob, Step

EOS = 2
TOKEN = np.ones(1, "<i4").tobytes()


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
                EmbedJob(
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
        elif isinstance(event, Embedded):
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
        permit.progressed(len(delta.tokens), at=delta.at, prefilled=(delta.prefilled, delta.prefill_s))
        request.generated += len(delta.tokens)
        if delta.finish is not None:
            permit.answered(by_itself=delta.finish == "stop")
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
            patch.object(stateful, "time", clock),
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


class SlotRequest:
    """A run on a device: it takes `seconds(rows, length)` of virtual time."""

    def __init__(self, world):
        self.world = world

    def set_callback(self, callback, slot):
        self.slot = slot

    def set_tensor(self, name, tensor):
        self.shape = tuple(tensor.shape)

    def start_async(self):
        self.world.started(self)

    def wait(self):
        pass

    def get_tensor(self, name):
        return SimpleNamespace(data=np.zeros((self.shape[0], 1), "<f4"))


class TextWorld(World):
    """The embedding engine: `slots` runs at once; a run of n padded tokens takes `overhead_s` + n × `token_s`."""

    def __init__(self, *, slots, token_s, overhead_s, step_tokens=512, max_outstanding=10**6, max_wait_s=1e6):
        capacity = Capacity(step_tokens=step_tokens)
        super().__init__(AdmissionLimits(max_outstanding, 16, max_wait_s, capacity))
        self.token_s, self.overhead_s = token_s, overhead_s
        self.runs = []
        self._running = []
        spec = EngineSpec("m", ModelKind.EMBEDDING, "/m", Device.CPU, "embedding", {"max_batch_tokens": step_tokens})
        self.runner = dynamic.EmbeddingRunner(spec)
        self.runner._slots = [dynamic._Slot(SlotRequest(self)) for _ in range(slots)]
        for slot in self.runner._slots:
            slot.request.slot = slot
        self.runner._idle = list(self.runner._slots)

    def started(self, request):
        batch = request.slot.batch
        waiting = self.runner._jobs.queue
        self.runs.append(
            Run(
                self.now,
                batch[0].interactive,
                len(batch) * batch[-1].length,
                {text.job_id for text in batch},
                interactive_left=len(waiting._interactive),
                batch_left=len(waiting._batch),
            )
        )
        seconds = self.overhead_s + self.token_s * request.shape[0] * request.shape[1]
        heapq.heappush(self._running, (self.now + seconds, next(self._order), request))

    def next_finish(self):
        return self._running[0][0] if self._running else None

    def wake(self):
        while self._running and self._running[0][0] <= self.now:
            self.runner._on_finished(heapq.heappop(self._running)[2].slot)

    def close(self):
        self.runner.close()


@dataclass
class Run:
    """A batch that was started, or a generation that was handed over, and what still waited then."""

    at: float
    interactive: bool
    tokens: int
    jobs: set
    interactive_left: int
    batch_left: int


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


class SequenceWorld(World):
    """The continuous engine: a step takes `step_s` and `token_s` for each of its tokens; prompts are split."""

    def __init__(self, *, sequences, step_s, token_s, step_tokens=256, max_outstanding=10**6, max_wait_s=1e6):
        super().__init__(
            AdmissionLimits(max_outstanding, sequences, max_wait_s, Capacity(sequences, step_tokens, step_tokens))
        )
        options = {"max_num_seqs": sequences, "max_num_batched_tokens": step_tokens}
        spec = EngineSpec("m", ModelKind.GENERATION, "/m", Device.CPU, "continuous", options)
        self.step_s, self.token_s, self.step_tokens = step_s, token_s, step_tokens
        self.runner = continuous.ContinuousRunner(spec)
        self.runner._pipeline = self
        self.runner._defaults = None
        self.handles = []
        self.runs, self.steps = [], 0
        self._configs = patch.object(continuous, "generation_config", lambda job, defaults: job)

    def run(self, until):
        with self._configs, patch.object(continuous.ov, "Tensor", lambda array: array):
            super().run(until)

    # GenAI's pipeline

    def add_request(self, _handle_id, prompt, job):
        request = self.jobs[job.id]
        handle = Handle(request, prompt.shape[1])
        self.handles.append(handle)
        queue = self.runner._queue
        self.runs.append(
            Run(
                self.now,
                request.interactive,
                request.prompt + request.limit,
                {job.id},
                len(queue._interactive),
                len(queue._batch),
            )
        )
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
        self.steps += 1
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


class Meter:
    def begin(self):
        pass

    def end(self):
        return SimpleNamespace(us=None, shared=False)

    so_far = end


@dataclass
class SingleWorld(World):
    """The NPU's generation engine, one answer at a time: `prompt_s` for each prompt token, `token_s` for a new one."""

    prompt_s: float
    token_s: float
    max_wait_s: float = 1e6
    runs: list = field(default_factory=list)

    def __post_init__(self):
        super().__init__(AdmissionLimits(10**6, 1, self.max_wait_s, capacity=Capacity(1)))
        spec = EngineSpec("m", ModelKind.GENERATION, "/m", Device.NPU, "s", {"max_prompt_len": 10**6}, emulated=True)
        self.runner = stateful.StatefulRunner(spec)
        self.runner._pipeline = self
        self.runner._meter = Meter()
        self.runner._defaults = None

    def run(self, until):
        module = stateful
        tensors = patch.object(module.ov, "Tensor", lambda array: array)
        inputs = patch.object(module.genai, "TokenizedInputs", lambda ids, mask: ids)
        with patch.object(module, "generation_config", lambda job, _: Config(job)), tensors, inputs:
            super().run(until)

    def generate(self, _ids, config, streamer):
        request = self.jobs[config.job.id]
        queue = self.runner._queue
        self.runs.append(
            Run(
                self.now,
                request.interactive,
                request.prompt + request.limit,
                {config.job.id},
                len(queue._interactive),
                len(queue._batch),
            )
        )
        self.now += self.prompt_s * request.prompt
        for _ in range(min(request.answer, request.limit)):
            self.now += self.token_s
            # Before the token: whoever comes in the meantime cannot know whether it will be the last.
            self.arrive()
            if streamer.write([EOS]) == genai.StreamingStatus.CANCEL:
                return SimpleNamespace(finish_reasons=[genai.GenerationFinishReason.NONE])
        cut = request.answer >= request.limit
        reason = genai.GenerationFinishReason.LENGTH if cut else genai.GenerationFinishReason.STOP
        return SimpleNamespace(finish_reasons=[reason])


@dataclass
class Config:
    job: GenerateJob

    def validate(self):
        pass
