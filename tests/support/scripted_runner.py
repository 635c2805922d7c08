"""An engine that misbehaves on demand, for fault tests only. It runs in a real engine process.

Options: `load_s` (seconds to load), `load_error` (message), `step_s` (seconds a token), `prefill_s` (seconds of silence
before a job's first token), `driver` (the version that it reports), `announce` (steps are announced as native calls),
`log` (a file that records what it was told), `hold` (a file: while it is there no step ends), `on_load` (a file: while
it says "wait" or "compute" loading does not end), `garbage_after` (the number of jobs that are echoed rightly before
all others become GARBAGE), `lost` (these lose their device instead). Each task is answered by a function of what was
asked.
A prompt's first token id picks the fault:

    POISON  breaks the process in the job's first step  HANG    stops its loop
    BREAK   breaks it while the job is prepared         STALL   never ends, while the loop beats
    TAKEN   breaks it when the pipeline takes it        EATER   is killed by SIGKILL in its first step
    LATE    breaks it in the job's third step           RAISE   raises an error in the job's first step
    WEDGE   never returns from a call for this job

Any other is echoed token by token.
"""

import os
import signal
import sys
import time
from array import array
from pathlib import Path

from worker_node.encoders.jobs import RowJob, RowResult
from worker_node.engines.protocol import DeviceBroken, EngineStats, Loaded, NativeCall
from worker_node.tasks.generate.messages import GenerateJob, Step, TokenDelta
from worker_node.tasks.transcribe.task import TranscribeJob, Transcript

POISON = 667
BREAK = 668
EATER = 669
LATE = 670
HANG = 777
WEDGE = 778
RAISE = 671
TAKEN = 672
STALL = 888
DIMENSIONS = 4
GARBAGE = 1
RUNNER = "tests.support.scripted_runner:ScriptedRunner"
_LATE_STEPS = 3


def result_of(job):
    """The one result of a reranking or transcription: logits are the pairs' lengths, the text tells the samples."""
    now = time.monotonic()
    if isinstance(job, RowJob):
        return RowResult(job.id, array("f", job.lengths).tobytes(), now, 0.0)
    return Transcript(job.id, f"{len(job.samples)} bytes of speech", now, 0.0)


class ScriptedRunner:
    jobs = RowJob | GenerateJob | TranscribeJob

    def __init__(self, spec):
        if spec.options.get("unreadable"):
            raise ValueError("an option cannot be read")
        self._options = spec.options
        self._running = {}
        self._single = []
        self._submitted = 0
        self._fresh = []
        self._stalled_at = None
        self._late = {}

    has_work = property(lambda self: bool(self._running or self._single))
    wake_fd = None

    def load(self):
        self._note(f"load {os.getpid()}")
        time.sleep(self._options.get("load_s", 0))
        if path := self._options.get("on_load"):
            while (order := Path(path).read_text()) in {"wait", "compute"}:
                time.sleep(0.01 if order == "wait" else 0)
        if message := self._options.get("load_error"):
            raise RuntimeError(message)
        return Loaded(0.01, "scripted", "0", self._options.get("driver"))

    def submit(self, job):
        if isinstance(job, TranscribeJob) or (isinstance(job, RowJob) and job.second):
            self._single.append(job)
            return
        tokens = array("i", job.tokens).tolist()
        if tokens[:1] == [HANG]:
            time.sleep(3600)
        self._note(f"submit {job.id}")
        self._submitted += 1
        if self._submitted > self._options.get("garbage_after", self._submitted):
            if self._options.get("lost"):
                raise DeviceBroken("the NPU failed in a generation: DEVICE_LOST")
            tokens = [GARBAGE] * len(tokens)
        self._running[job.id] = (job, tokens)
        self._fresh.append(job.id)

    def cancel(self, job_id):
        self._note(f"cancel {job_id}")
        self._running.pop(job_id, None)
        self._single = [job for job in self._single if job.id != job_id]

    def step(self, emit, poll):
        self._answer_single(emit)
        fresh, self._fresh = [job_id for job_id in self._fresh if job_id in self._running], []
        for job_id in fresh:
            self._begin(job_id, emit)
        if self._options.get("announce") and self._running:
            emit(NativeCall("prefill" if fresh else "step", len(self._running), list(self._running)))
        self._pass_time(fresh)
        if self._running:
            self._note(f"step of {len(self._running)}")
        deltas = []
        for job_id, (job, tokens) in list(self._running.items()):
            if tokens[:1] == [POISON]:
                self._note(f"die with {len(self._running)}")
                die()
            if tokens[:1] == [EATER]:
                os.kill(os.getpid(), signal.SIGKILL)
            if tokens[:1] == [STALL]:
                self._stalled_at = self._stalled_at or time.monotonic()
                time.sleep(0.01)
                continue
            if isinstance(job, RowJob):
                del self._running[job_id]
                vectors = array("f", [0.5] * len(job.lengths) * DIMENSIONS)
                emit(RowResult(job_id, vectors.tobytes(), time.monotonic(), 0.0))
                continue
            token, rest = tokens[0], tokens[1:]
            if token == LATE:
                rest = self._later(job_id, tokens)
            if not rest:
                del self._running[job_id]
            else:
                self._running[job_id] = (job, rest)
            deltas.append(TokenDelta(job_id, [token], None if rest else "stop", time.monotonic()))
        if deltas:
            emit(Step(deltas))

    def _answer_single(self, emit):
        while self._single:
            emit(result_of(self._single.pop(0)))

    def _pass_time(self, fresh):
        while Path(self._options.get("hold", "")).is_file():
            time.sleep(0.002)
        time.sleep(self._options.get("step_s", 0) + (self._options.get("prefill_s", 0) if fresh else 0))

    def _begin(self, job_id, emit):
        """What goes wrong in a call of its own."""
        fault = self._running[job_id][1][:1]
        if fault == [BREAK]:
            emit(NativeCall("prepare", 1, [job_id]))
            die()
        if fault == [TAKEN]:
            emit(NativeCall("begin", 1, [job_id]))
            die()
        if fault == [RAISE]:
            raise TypeError(f"the prompt cannot be read: {self._running[job_id][1]}")
        if fault == [WEDGE]:
            emit(NativeCall("prefill", 1, [job_id]))
            time.sleep(3600)

    def _later(self, job_id, tokens):
        """What goes wrong in the middle of an answer."""
        self._late[job_id] = self._late.get(job_id, 0) + 1
        if self._late[job_id] == _LATE_STEPS:
            die()
        return tokens

    def stats(self):
        oldest = None if self._stalled_at is None else (1, time.monotonic() - self._stalled_at)
        return EngineStats(running=len(self._running), oldest_run=oldest)

    def close(self):
        self._note("close")

    def _note(self, line):
        if path := self._options.get("log"):
            with Path(path).open("a") as log:
                log.write(line + "\n")


def die():
    """End as native code does that a request broke, without a core file."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)
