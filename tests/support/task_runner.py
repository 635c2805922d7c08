"""A scripted runner for every task: what its answers say is a function of what was asked. See `scripted_runner`."""

import time

import numpy as np

from tests.support.scripted_runner import ScriptedRunner
from worker_node.encoders.jobs import RowJob, RowResult
from worker_node.tasks.generate.messages import GenerateJob
from worker_node.tasks.transcribe.messages import TranscribeJob, Transcript

RUNNER = "tests.support.task_runner:TaskRunner"


def result_of(job):
    """The one result of a reranking or transcription: logits are the pairs' lengths, the text tells the samples."""
    now = time.monotonic()
    if isinstance(job, RowJob):
        return RowResult(job.id, np.asarray(job.lengths, "<f4").tobytes(), now, 0.0)
    return Transcript(job.id, f"{len(job.samples)} bytes of speech", now, 0.0)


class TaskRunner(ScriptedRunner):
    jobs = RowJob | GenerateJob | TranscribeJob

    def __init__(self, spec):
        super().__init__(spec)
        self._single = {}

    has_work = property(lambda self: bool(self._running or self._single))

    def submit(self, job):
        if isinstance(job, TranscribeJob) or (isinstance(job, RowJob) and job.second):
            self._single[job.id] = job
        else:
            super().submit(job)

    def cancel(self, job_id):
        self._single.pop(job_id, None)
        super().cancel(job_id)

    def step(self, emit, poll):
        single, self._single = self._single, {}
        for job in single.values():
            emit(result_of(job))
        super().step(emit, poll)
