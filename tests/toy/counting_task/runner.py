"""The engine: counts vowels. A text "wait" is never done with."""

import json
import time
from pathlib import Path

import msgspec

from counting_task.messages import Counted, CountJob
from counting_task.options import CountingOptions
from worker_node.core.types import Device
from worker_node.devices.npu import busy_meter
from worker_node.engines.protocol import EngineStats, Failed, Loaded


class CountingRunner:
    jobs = CountJob
    wake_fd = None

    def __init__(self, spec):
        self._spec = spec
        self._options = msgspec.convert(spec.options, CountingOptions)
        self._jobs = {}

    @property
    def has_work(self):
        return bool(self._jobs)

    def load(self):
        model = json.loads((Path(self._spec.path) / "vowels.json").read_text())
        self._vowels = frozenset(model["vowels"])
        self._meter = None
        if self._spec.device is Device.NPU:
            self._meter = busy_meter(
                self._options.busy_counter, self._spec.energy_meter(), stand_in=self._options.stand_in
            )
            self._meter.rest()
        return Loaded(0.0, f"counting {self._spec.device}", "1.0")

    def submit(self, job):
        self._jobs[job.id] = job

    def cancel(self, job_id):
        self._jobs.pop(job_id, None)

    def step(self, emit, poll):
        now = time.monotonic()
        for late in [job.id for job in self._jobs.values() if job.deadline <= now]:
            del self._jobs[late]
            emit(Failed(late, "deadline_exceeded", "the deadline passed while the texts were counted"))
        for job in list(self._jobs.values()):
            if "wait" not in job.texts:
                del self._jobs[job.id]
                emit(self._count(job))
        if self._jobs:
            time.sleep(0.005)

    def _count(self, job):
        began = time.monotonic()
        if self._meter is not None:
            self._meter.begin()
            time.sleep(0.001)  # work that the counter can show
        counts = [sum(letter in self._vowels for letter in text.lower()) for text in job.texts]
        busy = None if self._meter is None else self._meter.end()
        seconds = time.monotonic() - began
        if busy is None:
            return Counted(job.id, counts, began, seconds)
        return Counted(job.id, counts, began, seconds, busy)

    def stats(self):
        return EngineStats(running=len(self._jobs))

    def close(self):
        self._jobs.clear()
