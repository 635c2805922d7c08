"""The embedding engine in virtual time."""

import heapq
from types import SimpleNamespace

import numpy as np

from tests.unit.worker_node.scheduling.virtual.world import Run, World
from worker_node.core.types import Device, ModelKind
from worker_node.encoders.dynamic import DynamicEncoder, _Slot
from worker_node.engines.protocol import EngineSpec
from worker_node.scheduling.admission import AdmissionLimits


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

    def get_output_tensor(self, index):
        return SimpleNamespace(data=np.zeros((self.shape[0], 1), "<f4"))


class TextWorld(World):
    """The embedding engine: `slots` runs at once; a run of n padded tokens takes `overhead_s` + n × `token_s`."""

    def __init__(self, *, slots, token_s, overhead_s, step_tokens=512, max_outstanding=10**6, max_wait_s=1e6):
        super().__init__(AdmissionLimits(max_outstanding, 16, max_wait_s, step_tokens=step_tokens))
        self.token_s, self.overhead_s = token_s, overhead_s
        self.runs = []
        self._running = []
        spec = EngineSpec("m", ModelKind.EMBEDDING, "/m", Device.CPU, "embedding", {"max_batch_tokens": step_tokens})
        self.runner = DynamicEncoder(spec)
        self.runner._slots = [_Slot(SlotRequest(self)) for _ in range(slots)]
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
