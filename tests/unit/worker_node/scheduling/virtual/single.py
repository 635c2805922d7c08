"""The NPU's generation engine in virtual time: one answer at a time."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import openvino_genai as genai

from tests.unit.worker_node.scheduling.virtual.world import Run, World
from worker_node.core.types import Device, ModelKind
from worker_node.engines.protocol import EngineSpec
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.tasks.generate import stateful
from worker_node.tasks.generate.messages import GenerateJob

EOS = 2


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
        super().__init__(AdmissionLimits(10**6, 1, self.max_wait_s, sequences=1))
        spec = EngineSpec("m", ModelKind.GENERATION, "/m", Device.NPU, "s", {"max_prompt_len": 10**6}, emulated=True)
        self.runner = stateful.StatefulRunner(spec)
        self.runner._pipeline = self
        self.runner._meter = Meter()
        self.runner._defaults = None

    def run(self, until):
        module = stateful
        tensors = patch.object(module.ov, "Tensor", lambda array: array)
        inputs = patch.object(module.genai, "TokenizedInputs", lambda ids, mask: ids)
        configs = [patch.object(m, "generation_config", lambda job, _: Config(job)) for m in (stateful, stateful)]
        with configs[0], configs[1], tensors, inputs:
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
