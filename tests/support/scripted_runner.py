"""An engine that misbehaves on demand, for fault tests only. It runs in a real engine process.

Options: `load_s` (seconds to load), `load_error` (message), `step_s` (seconds a token), `log` (a file that records what
the engine was told). A prompt's first token id picks the fault: CRASH kills the process, HANG stops its loop, and any
other is echoed token by token.
"""

import os
import signal
import time
from pathlib import Path

import numpy as np

from worker_node.engines.messages import Embedded, EmbedJob, EngineStats, Loaded, Step, TokenDelta

CRASH = 666
HANG = 777
DIMENSIONS = 4


class ScriptedRunner:
    def __init__(self, spec):
        self._options = spec.options
        self._running = {}

    has_work = property(lambda self: bool(self._running))
    wake_fd = None

    def load(self):
        self._note(f"load {os.getpid()}")
        time.sleep(self._options.get("load_s", 0))
        if message := self._options.get("load_error"):
            raise RuntimeError(message)
        return Loaded(0.01, "scripted", "0")

    def submit(self, job):
        tokens = np.frombuffer(job.tokens, "<i4").tolist()
        if tokens[:1] == [CRASH]:
            os.kill(os.getpid(), signal.SIGKILL)
        if tokens[:1] == [HANG]:
            time.sleep(3600)
        self._note(f"submit {job.id}")
        self._running[job.id] = (job, tokens)

    def cancel(self, job_id):
        self._note(f"cancel {job_id}")
        self._running.pop(job_id, None)

    def step(self, emit, poll):
        time.sleep(self._options.get("step_s", 0))
        deltas = []
        for job_id, (job, tokens) in list(self._running.items()):
            if isinstance(job, EmbedJob):
                del self._running[job_id]
                vectors = np.full((len(job.lengths), DIMENSIONS), 0.5, "<f4")
                emit(Embedded(job_id, vectors.tobytes(), time.monotonic(), 0.0))
                continue
            token, rest = tokens[0], tokens[1:]
            if not rest:
                del self._running[job_id]
            else:
                self._running[job_id] = (job, rest)
            deltas.append(TokenDelta(job_id, [token], None if rest else "stop", time.monotonic()))
        if deltas:
            emit(Step(deltas))

    def stats(self):
        return EngineStats(running=len(self._running))

    def close(self):
        self._note("close")

    def _note(self, line):
        if path := self._options.get("log"):
            with Path(path).open("a") as log:
                log.write(line + "\n")
