"""A runner that does wrong what the file of `npu-node serve --faults` says, around the real one."""

from __future__ import annotations

import logging
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from worker_node.engines.child import make_runner
from worker_node.engines.protocol import (
    VECTOR_DTYPE,
    DeviceBroken,
    EngineSpec,
    EngineStats,
    Event,
    Inbox,
    JobResult,
    Loaded,
    Outbox,
    Outcome,
)
from worker_node.settings.faults import Fault

log = logging.getLogger(__name__)

RUNNER = f"{__name__}:FaultyRunner"
# Tokens that every vocabulary has.
_GARBAGE = range(100, 5000)


def faulty(spec: EngineSpec, faults: Sequence[Fault]) -> EngineSpec:
    """The engine with these faults."""
    options = {
        "runner": spec.runner,
        "options": spec.options,
        "faults": [fault.model_dump(mode="json") for fault in faults],
    }
    return msgspec.structs.replace(spec, runner=RUNNER, options=options)


class _Altered(Outcome, frozen=True):
    results: Sequence[Any]
    announced: bool

    @property
    def followed(self) -> bool:
        return self.announced

    def parts(self) -> Sequence[JobResult]:
        return self.results


class FaultyRunner:
    """A `Runner` whose faults are those of its options. All else is the real runner's."""

    def __init__(self, spec: EngineSpec) -> None:
        given: dict[str, Any] = dict(spec.options)
        self._faults = [Fault.model_validate(fault) for fault in given["faults"]]
        inner = dict(given["options"])
        if any(fault.kind == "still_counter" for fault in self._faults):
            # It counts for the device, so it is still for every request.
            self._counter = tempfile.NamedTemporaryFile(suffix="-still-counter")  # noqa: SIM115  (as long as the engine)
            Path(self._counter.name).write_text("1000000\n", encoding="ascii")
            inner |= {"busy_counter": self._counter.name, "stand_in": False}
        self._runner = make_runner(msgspec.structs.replace(spec, runner=given["runner"], options=inner))
        self._count = 0
        self._struck: dict[int, list[Fault]] = {}
        self._heard: Any = None
        log.warning("%s on %s has faults on demand: %s", spec.model_id, spec.device, "; ".join(map(str, self._faults)))

    @property
    def jobs(self) -> Any:
        return self._runner.jobs

    @property
    def has_work(self) -> bool:
        return self._runner.has_work

    @property
    def wake_fd(self) -> int | None:
        return self._runner.wake_fd

    def load(self) -> Loaded:
        """Load, slowly where that is the fault."""
        wait = sum(fault.seconds for fault in self._faults if fault.kind == "slow_compile")
        time.sleep(wait)
        loaded = self._runner.load()
        return msgspec.structs.replace(loaded, seconds=loaded.seconds + wait)

    def submit(self, job: Any) -> None:
        """Note which faults strike the job."""
        self._count += 1
        size = job.prompt_tokens if hasattr(job, "prompt_tokens") else max(job.lengths, default=0)
        self._struck[job.id] = [
            fault
            for fault in self._faults
            if self._count > fault.after
            and (self._count - fault.after - 1) % fault.every == 0
            and size > fault.beyond_tokens
        ]
        self._runner.submit(job)

    def cancel(self, job_id: int) -> None:
        """As the real runner."""
        self._struck.pop(job_id, None)
        self._runner.cancel(job_id)

    def step(self, emit: Outbox, poll: Inbox) -> None:
        """A step, unless a fault ends the process, the device or the loop."""
        kinds = {fault.kind for faults in self._struck.values() for fault in faults}
        if "crash" in kinds:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "hang" in kinds:
            while True:
                time.sleep(3600)
        if "lost_device" in kinds:
            raise DeviceBroken("the NPU failed: ZE_RESULT_ERROR_DEVICE_LOST (a fault on demand)")
        self._runner.step(lambda event: emit(self._altered(event)), poll)

    def stats(self) -> EngineStats:
        """As the real runner."""
        return self._runner.stats()

    def close(self) -> None:
        """As the real runner."""
        self._runner.close()

    def _altered(self, event: Event | Outcome) -> Event | Outcome:
        if not isinstance(event, Outcome):
            return event
        return _Altered([self._wrong(part) for part in event.parts()], event.followed)

    def _wrong(self, part: Any) -> Any:
        faults = self._struck.get(part.id, [])
        if part.last:
            self._struck.pop(part.id, None)
        garbage = next((fault for fault in faults if fault.kind == "garbage"), None)
        if garbage is not None:
            part = _garbled(part, random.Random(f"{garbage.seed}/{part.id}"))
        if hasattr(part, "text"):
            before, self._heard = self._heard, part
            if before is not None and any(fault.kind == "stale_audio" for fault in faults):
                part = msgspec.structs.replace(part, text=before.text, segments=before.segments, words=before.words)
        return part


def _garbled(part: Any, rng: random.Random) -> Any:
    if hasattr(part, "tokens") and isinstance(part.tokens, list):
        return msgspec.structs.replace(part, tokens=[rng.choice(_GARBAGE) for _ in part.tokens])
    if hasattr(part, "data"):
        numbers = [rng.gauss(0, 1) for _ in range(len(part.data) // 4)]
        return msgspec.structs.replace(part, data=np.array(numbers, VECTOR_DTYPE).tobytes())
    return msgspec.structs.replace(part, text=" ".join(reversed(part.text.split())) or "garbage")
