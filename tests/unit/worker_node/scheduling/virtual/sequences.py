"""The continuous generation engine in virtual time."""

from collections import deque
from types import SimpleNamespace
from unittest.mock import patch

import openvino_genai as genai

from tests.unit.worker_node.scheduling.virtual.world import Run, World
from worker_node.core.types import Device, ModelKind
from worker_node.engines.protocol import EngineSpec
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.tasks.generate import continuous

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


class SequenceWorld(World):
    """The continuous engine: a step takes `step_s` and `token_s` for each of its tokens; prompts are split."""

    def __init__(self, *, sequences, step_s, token_s, step_tokens=256, max_outstanding=10**6, max_wait_s=1e6):
        super().__init__(AdmissionLimits(max_outstanding, sequences, max_wait_s, sequences, step_tokens))
        options = {"max_num_seqs": sequences, "max_num_batched_tokens": step_tokens}
        spec = EngineSpec("m", ModelKind.GENERATION, "/m", Device.CPU, "continuous", options)
        self.step_s, self.token_s, self.step_tokens = step_s, token_s, step_tokens
        self.runner = continuous.ContinuousRunner(spec)
        self.runner._pipeline = self
        self.runner._defaults = None
        self.handles = []
        self.runs, self.steps = [], 0
        self._configs = patch.object(continuous, "generation_config", lambda job, _defaults, **_options: job)

    def run(self, until):
        with self._configs, patch.object(continuous.ov, "Tensor", lambda array: array):
            super().run(until)

    # GenAI's pipeline

    def add_request(self, _handle_id, prompt, job):
        request = self.jobs[job.id]
        handle = Handle(request, prompt.shape[1])
        self.handles.append(handle)
        self.runs.append(Run(self.now, request.interactive, request.prompt + request.limit, {job.id}))
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
