"""A placement is a model on a device: the engine that runs it, its limits, its admission control, its memory.

Its life, which `Placement.state` and `Placement.request` tell:

    excluded      an `ExcludedPlacement`: never has an engine
    unloaded      `request_load` begins a load request, which waits for its turn or for memory: `starting` to callers
    starting      the manager lets the engine load; until `observe` sees the end of the load
    ready         serves; `unload_when_idle` and the keep-alive end it: `unloading`, then unloaded
    backing off, quarantined, failed
                  the engine's process has ended, and its supervisor starts the next one
    stopped       the model was removed, or the node ends
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from worker_node.core.errors import DeadlineExceeded, InsufficientMemory
from worker_node.core.types import NOTHING, Device, Feature
from worker_node.engines.isolation import Isolation, Suspects
from worker_node.engines.protocol import EngineState, EngineStatus
from worker_node.engines.supervisor import Engine
from worker_node.models.passports import NOT_CERTIFIED, Standing
from worker_node.scheduling.admission import Admission

# Until a load has been timed: a process that starts and imports OpenVINO, then reads and compiles the weights.
_START_S = 3.0
_BYTES_PER_S = 100e6


@dataclass(frozen=True, slots=True)
class ExcludedPlacement:
    """A device that a model may not run on, and why; `standing` is what the passports say of the model there."""

    device: Device
    emulated: bool
    standing: Standing
    reason: str


@dataclass(slots=True)
class LoadRequest:
    """The engine is to be loaded, `since` when.

    `on_request`: it began for a request, and others wait for it too. `insisted`: it stays when nobody waits for it.
    `shortage` says why it waits for memory.
    """

    since: float
    on_request: bool = False
    insisted: bool = False
    shortage: str | None = None


@dataclass(eq=False, slots=True)
class Placement:
    """`prompt_limit` and `total_limit` are tokens, for the prompt, and for prompt and answer together.

    `lacks` is what its engine cannot do. An `eager` engine is loaded at start-up, any other for the requests that need
    it. `standing` is what the passports said of it when it was built, `notes` what else was found then,
    `faults` the faults on demand of its engine, in words. `options` are what the settings set for its engine.
    `suspects` are those of the model, shared by its placements. `parts` say where each part of the model runs, if not
    all of it runs on `device`. All times are monotonic seconds of `clock`, all sizes bytes.
    """

    device: Device
    engine: Engine
    admission: Admission
    prompt_limit: int
    total_limit: int
    emulated: bool = False
    eager: bool = False
    standing: Standing = NOT_CERTIFIED
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    lacks: frozenset[Feature] = NOTHING
    parts: Mapping[str, Device] = field(default_factory=dict)
    isolation: Isolation = field(default_factory=Isolation)
    suspects: Suspects = field(default_factory=Suspects)

    # Its memory before it was ever loaded; `after_load` is what was measured then, `held` what it takes now.
    estimate: int = 0
    weights: int = 0
    pinned: bool = False
    pool: str = "host"
    # Its first load compiles for an NPU, which takes minutes or hours.
    cold: bool = False
    clock: Callable[[], float] = time.monotonic
    # Notifies the manager of a change. Without a manager the engine is loaded at once.
    on_change: Callable[[], None] | None = None
    after_load: int | None = None
    held: int | None = None
    request: LoadRequest | None = None
    # Why the last load request was refused.
    refusal: str | None = None
    unload_when_idle: bool = False
    unloading: bool = False
    waiters: int = 0
    loading_since: float | None = None
    load_s: float | None = None
    ready_at: float = 0.0
    # When the last request left its engine.
    used_at: float = 0.0
    loads: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> EngineState:
        """The engine's state; one whose load request waits for its turn counts as starting."""
        return EngineState.STARTING if self.queued else self.engine.status.state

    @property
    def status(self) -> EngineStatus:
        return replace(self.engine.status, state=self.state, reason=self.reason)

    @property
    def queued(self) -> bool:
        """Whether its load was requested and has not begun."""
        return self.request is not None and self.engine.status.state is EngineState.UNLOADED

    @property
    def reason(self) -> str | None:
        status = self.engine.status
        if status.state is not EngineState.UNLOADED:
            return status.reason
        return self.shortage or ("it waits for its turn" if self.queued else status.reason)

    @property
    def shortage(self) -> str | None:
        """Why its load waits for memory, or was refused for the lack of it."""
        return self.refusal if self.request is None else self.request.shortage

    @property
    def memory(self) -> int:
        return self.after_load if self.after_load is not None else self.estimate

    def request_load(self, *, on_request: bool = False, insist: bool = True) -> None:
        """Load the engine as soon as possible; returns at once (`settled` waits).

        Unless `insist`, the load begins only while a request waits. Without a manager it begins now.
        """
        if self.on_change is None:
            self.engine.wake()
            return
        self.unload_when_idle = False
        self.refusal = None
        self.request = self.request or LoadRequest(self.clock())
        self.request.on_request |= on_request
        self.request.insisted |= insist
        self.on_change()

    def observe(self, memory: int | None) -> None:
        """Record the engine's state. `memory` is what its process takes, None if it has none."""
        now, state = self.clock(), self.engine.status.state
        self.held = memory if state in {EngineState.STARTING, EngineState.READY} else None
        if state is EngineState.STARTING:
            self.loading_since = now if self.loading_since is None else self.loading_since
        elif self.loading_since is not None:
            if state is EngineState.READY:
                self.load_s, self.ready_at, self.after_load = now - self.loading_since, now, memory
                self.loads += 1
            self.loading_since = self.request = None
            self.changed()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Count a request that waits for the engine. A load without waiting requests is not started."""
        self.waiters += 1
        try:
            yield
        finally:
            self.waiters -= 1
            if self.request is not None and self.queued and not self.waiters and not self.request.insisted:
                self.request = None
            if self.on_change is not None:
                self.on_change()

    async def settled(self, deadline: float) -> None:
        """Wait until the engine is ready, or known not to be soon. Raises DeadlineExceeded, InsufficientMemory."""
        with self.awaited():
            self.raise_refusal()
            # One that served is started again after a pause.
            while self.state is EngineState.STARTING or self.engine.status.returns:
                if not await first_change([self], deadline):
                    raise DeadlineExceeded("the deadline passed while the model was being loaded")
                self.raise_refusal()

    def raise_refusal(self) -> None:
        if self.refusal is not None:
            raise InsufficientMemory(self.refusal)

    def changed(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def change(self) -> Coroutine[None, None, object]:
        return self._changed.wait()

    def expected_load_s(self) -> float:
        """How long a load takes: as the last one did, else guessed from the weights' size; inf for a cold compile."""
        if self.load_s is not None:
            return self.load_s
        return math.inf if self.cold else _START_S + self.weights / _BYTES_PER_S

    def ready_in(self) -> float | None:
        """Seconds until an engine that is loaded, would be loaded or is restarted is likely to be ready.

        inf where nobody knows; None for an engine that does not become ready by itself soon.
        """
        status, load_s = self.engine.status, self.expected_load_s()
        if self.on_change is None or not status.state.loadable:
            if self.load_s is None and status.loaded is not None:
                load_s = status.loaded.seconds
        elif self.loading_since is not None:
            return max(0.5, self.loading_since + load_s - self.clock())
        if status.state.loadable:
            return load_s
        return (status.retry_after or 0.0) + load_s if status.returns else None


async def first_change(placements: Sequence[Placement], until: float = math.inf) -> bool:
    """Wait for the first change of an engine or of its load request after this call; False if none came in time."""
    waits = [
        asyncio.ensure_future(change)
        for placement in placements
        for change in (placement.engine.next_change(), placement.change())
    ]
    try:
        timeout = None if math.isinf(until) else max(0.0, until - placements[0].clock())
        done, _ = await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return bool(done)
