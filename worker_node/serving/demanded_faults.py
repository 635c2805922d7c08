"""Faults on demand: engines that do wrong what a file says, so that users can test what depends on a node."""

from __future__ import annotations

import logging
import os
import random
import signal
import struct
import tempfile
import time
import tomllib
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device
from worker_node.engines.child import make_runner
from worker_node.engines.protocol import DeviceBroken, EngineSpec, Event, Inbox, JobResult, Loaded, Outbox, Outcome
from worker_node.settings import NodeSettings

log = logging.getLogger(__name__)

_MOST_BYTES = 100_000
# Tokens that every vocabulary has.
_GARBAGE = range(100, 5000)
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault of the engines of a model (default: of all) on a device (default: on any).

    Requests are counted in each engine process, the canary's among them: it strikes the first one after `after`, and
    each `every`th from there; `beyond_tokens`: only those with longer prompts, texts or recordings. `seconds` are those
    of a slow compile. Equal seeds make equal garbage.
    """

    kind: Literal["garbage", "stale_audio", "still_counter", "lost_device", "slow_compile", "crash", "hang"]
    model: str | None = None
    device: Device | None = None
    after: _Count = 0
    every: Annotated[int, msgspec.Meta(ge=1)] = 1
    beyond_tokens: _Count = 0
    seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 60.0
    seed: int = 0

    def strikes(self, count: int, tokens: int) -> bool:
        since = count - self.after - 1
        return since >= 0 and since % self.every == 0 and tokens > self.beyond_tokens

    def __str__(self) -> str:
        given = msgspec.to_builtins(self)
        return " ".join([given.pop("kind"), *(f"{name}={value}" for name, value in given.items())])


class _File(msgspec.Struct, forbid_unknown_fields=True):
    fault: tuple[Fault, ...]


@cache
def read_faults(path: Path | None) -> tuple[Fault, ...]:
    """The faults of a TOML file, read once for the life of a node. Raises ConfigurationError."""
    if path is None:
        return ()
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        return msgspec.convert(tomllib.loads(content.decode()), _File).fault
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"faults must be a TOML file of [[fault]], and {path} is not: {error}") from None


def check_faults(settings: NodeSettings, served: Collection[str]) -> None:
    """Raise ConfigurationError for a fault that would strike nothing: a test of it would show nothing."""
    for fault in read_faults(settings.faults):
        if fault.model is not None and fault.model not in served:
            raise ConfigurationError(
                f"faults: model must be the id of a model of the settings ({', '.join(served)}), got {fault.model}"
            )


def faults_of(model: str, device: Device, settings: NodeSettings) -> list[Fault]:
    """Those of the model's engine on the device: real devices have none unless `allow_faults` is set."""
    if not settings.allow_faults and not (device is Device.NPU and settings.npu_emulation):
        return []
    return [
        fault
        for fault in read_faults(settings.faults)
        if fault.model in {None, model} and fault.device in {None, device}
    ]


def faulty(spec: EngineSpec, faults: Sequence[Fault]) -> EngineSpec:
    if not faults:
        return spec
    options = {"runner": spec.runner, "options": spec.options, "faults": msgspec.to_builtins(faults)}
    return msgspec.structs.replace(spec, runner=f"{__name__}:FaultyRunner", options=options)


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
        self._faults = msgspec.convert(given["faults"], list[Fault])
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def load(self) -> Loaded:
        wait = sum(fault.seconds for fault in self._faults if fault.kind == "slow_compile")
        time.sleep(wait)
        loaded = self._runner.load()
        return msgspec.structs.replace(loaded, seconds=loaded.seconds + wait)

    def submit(self, job: Any) -> None:
        self._count += 1
        tokens = job.prompt_tokens if hasattr(job, "prompt_tokens") else max(job.lengths, default=0)
        self._struck[job.id] = [fault for fault in self._faults if fault.strikes(self._count, tokens)]
        self._runner.submit(job)

    def cancel(self, job_id: int) -> None:
        self._struck.pop(job_id, None)
        self._runner.cancel(job_id)

    def step(self, emit: Outbox, poll: Inbox) -> None:
        kinds = {fault.kind for faults in self._struck.values() for fault in faults}
        if "crash" in kinds:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "hang" in kinds:
            while True:
                time.sleep(3600)
        if "lost_device" in kinds:
            raise DeviceBroken("the NPU failed: ZE_RESULT_ERROR_DEVICE_LOST (a fault on demand)")
        self._runner.step(lambda event: emit(self._altered(event)), poll)

    def _altered(self, event: Event | Outcome) -> Event | Outcome:
        if not isinstance(event, Outcome):
            return event
        return _Altered([self._wrong(part) for part in event.parts()], event.followed)

    def _wrong(self, part: Any) -> Any:
        faults = {fault.kind: fault for fault in self._struck.get(part.id, [])}
        if part.last:
            self._struck.pop(part.id, None)
        if "garbage" in faults:
            part = _garbled(part, random.Random(f"{faults['garbage'].seed}/{part.id}"))
        if hasattr(part, "text"):
            before, self._heard = self._heard, part
            if before is not None and "stale_audio" in faults:
                part = msgspec.structs.replace(part, text=before.text, segments=before.segments, words=before.words)
        return part


def _garbled(part: Any, rng: random.Random) -> Any:
    if hasattr(part, "tokens") and isinstance(part.tokens, list):
        return msgspec.structs.replace(part, tokens=[rng.choice(_GARBAGE) for _ in part.tokens])
    if hasattr(part, "data"):
        numbers = [rng.gauss(0, 1) for _ in range(len(part.data) // 4)]
        return msgspec.structs.replace(part, data=struct.pack(f"<{len(numbers)}f", *numbers))
    return msgspec.structs.replace(part, text=" ".join(reversed(part.text.split())) or "garbage")
