"""Engines that fail on purpose: a runner around the real one, in engine processes that a changed environment starts."""

import importlib
import inspect
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from worker_node.engines.protocol import VECTOR_DTYPE, DeviceBroken, Outcome

ROOT = Path(__file__).parents[2]
# Tokens that every vocabulary has.
GARBAGE = range(100, 5000)


def faulty_environment(directory, *, device="NPU", **fault):
    """The environment in which engines on `device` have one fault; it is inherited by all processes of a node.

    `kind` is garbage, stale_audio, still_counter, lost_device, slow_compile, crash or hang. The fault strikes each job
    of an engine process after the first `after`, the canary's among them, whose longest input has more than
    `beyond_tokens`; `seconds` are those of a slow compile.
    """
    (directory / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'worker_node.engines.child' in sys.orig_argv:\n"
        "    from tests.support.faulty_runner import install\n"
        f"    install({device!r}, {fault!r})\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}


def install(device, fault):
    """Have `engines.child` make faulty runners in this process."""
    real = importlib.import_module

    class Module:
        def __init__(self, module):
            self._module = module

        def __getattr__(self, name):
            found = getattr(self._module, name)
            is_runner = inspect.isclass(found) and hasattr(found, "step")
            return (lambda spec: FaultyRunner(found, spec, device, **fault)) if is_runner else found

    importlib.import_module = lambda name, package=None: Module(real(name, package))
    sys.stderr.write(f"engines on {device} are faulty: {fault}\n")


class Altered(Outcome, frozen=True):
    results: Sequence[Any]
    announced: bool

    @property
    def followed(self):
        return self.announced

    def parts(self):
        return self.results


class FaultyRunner:
    """A `Runner` with one fault; all else is the real runner's."""

    def __init__(self, real, spec, device, kind, after=0, beyond_tokens=0, seconds=60.0):
        self.kind = kind if spec.device == device else None
        self.after, self.beyond_tokens, self.seconds = after, beyond_tokens, seconds
        if self.kind == "still_counter":
            self.counter = tempfile.NamedTemporaryFile(suffix="-still-counter")  # noqa: SIM115
            Path(self.counter.name).write_text("1000000\n", encoding="ascii")
            own = {"busy_counter": self.counter.name, "stand_in": False}
            spec = msgspec.structs.replace(spec, options=spec.options | own)
        self.runner = real(spec)
        self.count = 0
        self.struck = set()
        self.heard = None

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def load(self):
        wait = self.seconds if self.kind == "slow_compile" else 0.0
        time.sleep(wait)
        loaded = self.runner.load()
        return msgspec.structs.replace(loaded, seconds=loaded.seconds + wait)

    def submit(self, job):
        self.count += 1
        size = job.prompt_tokens if hasattr(job, "prompt_tokens") else max(job.lengths, default=0)
        if self.count > self.after and size > self.beyond_tokens:
            self.struck.add(job.id)
        self.runner.submit(job)

    def cancel(self, job_id):
        self.struck.discard(job_id)
        self.runner.cancel(job_id)

    def step(self, emit, poll):
        kind = self.kind if self.struck else None
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "hang":
            time.sleep(3600)
        if kind == "lost_device":
            raise DeviceBroken("the NPU failed: ZE_RESULT_ERROR_DEVICE_LOST (a fault of the test)")
        self.runner.step(lambda event: emit(self.altered(event)), poll)

    def altered(self, event):
        if not isinstance(event, Outcome):
            return event
        return Altered([self.wrong(part) for part in event.parts()], event.followed)

    def wrong(self, part):
        struck = part.id in self.struck
        if part.last:
            self.struck.discard(part.id)
        if struck and self.kind == "garbage":
            part = garbled(part, random.Random(part.id))
        if hasattr(part, "text"):
            before, self.heard = self.heard, part
            if struck and before is not None and self.kind == "stale_audio":
                part = msgspec.structs.replace(part, text=before.text, segments=before.segments, words=before.words)
        return part


def garbled(part, rng):
    if hasattr(part, "tokens") and isinstance(part.tokens, list):
        return msgspec.structs.replace(part, tokens=[rng.choice(GARBAGE) for _ in part.tokens])
    if hasattr(part, "data"):
        numbers = [rng.gauss(0, 1) for _ in range(len(part.data) // 4)]
        return msgspec.structs.replace(part, data=np.array(numbers, VECTOR_DTYPE).tobytes())
    return msgspec.structs.replace(part, text=" ".join(reversed(part.text.split())) or "garbage")
