"""A model on a device: the engine that runs it, its limits, its admission control, and its part in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker_node.domain import Device
from worker_node.engines.base import Engine, EngineState, EngineStatus
from worker_node.errors import DeadlineExceeded, InsufficientMemory
from worker_node.hosting.isolation import Isolation
from worker_node.hosting.suspicion import Suspects
from worker_node.manager.residency import Residency
from worker_node.routing import NOTHING, Candidate, Feature, Obstacle
from worker_node.scheduling.admission import Admission

_OBSTACLES: dict[EngineState, Obstacle] = {
    EngineState.UNLOADED: "model_loading",
    EngineState.STARTING: "model_loading",
    EngineState.BACKING_OFF: "device_unavailable",
    EngineState.QUARANTINED: "device_quarantined",
    EngineState.FAILED: "device_unavailable",
    EngineState.STOPPED: "device_unavailable",
}
_COMING = frozenset({EngineState.UNLOADED, EngineState.STARTING})
_RETURNING = frozenset({EngineState.STARTING, EngineState.BACKING_OFF})


@dataclass(frozen=True, slots=True)
class Placement:
    """`prompt_limit` and `total_limit` are tokens, as in `routing.Candidate`.

    `lacks` is what its engine cannot do. An `on_demand` engine is loaded for the requests that need it, an `eager` one
    at start-up. `notes` say what was found when it was built, `options` what the settings set for its engine.
    `suspects` are those of the model, shared by its placements. `parts` say where each part of the model runs, if not
    all of it runs on `device`. `uses` are the directories of other models that the engine reads when it is loaded.
    """

    device: Device
    engine: Engine
    admission: Admission
    prompt_limit: int
    total_limit: int
    emulated: bool = False
    on_demand: bool = False
    eager: bool = False
    notes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    lacks: frozenset[Feature] = NOTHING
    parts: Mapping[str, Device] = field(default_factory=dict)
    uses: tuple[Path, ...] = ()
    isolation: Isolation = field(default_factory=Isolation)
    suspects: Suspects = field(default_factory=Suspects)
    residency: Residency = field(default_factory=Residency, compare=False, repr=False)
    # As routing sees it while its engine is ready, which is what every request asks for.
    _ready: Candidate = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        ready = Candidate(self.device, self.prompt_limit, self.total_limit, lacks=self.lacks)
        object.__setattr__(self, "_ready", ready)

    @property
    def state(self) -> EngineState:
        """The engine's state; one whose load is wanted and waits for its turn counts as starting."""
        state = self.engine.status.state
        queued = state is EngineState.UNLOADED and self.residency.wanted_since is not None
        return EngineState.STARTING if queued else state

    @property
    def reason(self) -> str | None:
        """Why the engine is not ready; None when it is."""
        status, residency = self.engine.status, self.residency
        if status.state is not EngineState.UNLOADED:
            return status.reason
        return "it waits for its turn" if residency.wanted_since is not None else residency.refusal or status.reason

    @property
    def awaited(self) -> bool:
        """Whether requests wait for its load: an on-demand engine, or one that the manager unloaded or is replacing."""
        return (
            self.on_demand
            or self.residency.on_request
            or self.engine.status.replacing
            or self.state is EngineState.UNLOADED
        )

    def wake(self, *, insist: bool = False) -> None:
        """Start to load the engine; return at once (`settled` waits). Unless `insist`, only while a request waits."""
        self.residency.want(on_request=True, insist=insist)
        if self.residency.ask is None:
            self.residency.settle()
            self.engine.wake()

    async def settled(self, deadline: float, *, patient: bool = False) -> None:
        """Wait until the engine is ready, or known not to become ready soon.

        `patient`: also wait for memory that other models use. Raises DeadlineExceeded, InsufficientMemory.
        """
        residency = self.residency
        residency.waiters += 1
        residency.patient += patient
        try:
            async with asyncio.timeout(max(0.0, deadline - residency.clock())):
                while True:
                    if residency.refusal is not None:
                        raise InsufficientMemory(residency.refusal)
                    if self.engine.status.state is not EngineState.UNLOADED:
                        await self.engine.settled()
                        return
                    if residency.wanted_since is None:
                        return
                    await residency.change()
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed while the model was being loaded") from error
        finally:
            residency.waiters -= 1
            residency.patient -= patient
            unstarted = self.engine.status.state is EngineState.UNLOADED
            if unstarted and not residency.waiters and not residency.insisted:
                residency.settle()
            if residency.ask is not None:
                residency.ask()

    def expected_load_s(self) -> float:
        """Seconds until a load that begins now, or is going on, has ended, as far as is known."""
        status = self.engine.status
        if self.residency.ask is None and status.load_seconds is not None:
            return status.load_seconds
        return self.residency.ready_in()

    async def returned(self, deadline: float) -> None:
        """Wait until an engine that is being restarted is ready, or has failed. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self.residency.clock())):
                while self.returning_in() is not None:
                    await self.engine.next_change()
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the engine was started again") from error

    def returning_in(self) -> float | None:
        """Seconds until an engine that served and is being restarted is likely to be ready; None for any other."""
        status = self.engine.status
        if not status.served or status.state not in _RETURNING:
            return None
        if status.state is EngineState.STARTING:
            return self.expected_load_s()
        known = status.load_seconds if self.residency.load_s is None else self.residency.load_s
        load_s = self.residency.expected_load_s() if known is None else known
        return (status.retry_after or 0.0) + load_s

    def candidate(self) -> Candidate:
        """This placement as routing sees it now."""
        if self.engine.ready:
            return self._ready
        status = self.engine.status
        return Candidate(
            device=self.device,
            prompt_limit=self.prompt_limit,
            total_limit=self.total_limit,
            obstacle=_OBSTACLES.get(status.state),
            detail=status.reason,
            lacks=self.lacks,
            retry_after=self._ready_in(status),
        )

    def _ready_in(self, status: EngineStatus) -> float | None:
        """Seconds until it is worth asking again; None if that is not known."""
        if status.state in _COMING:
            return self.expected_load_s()
        returning = self.returning_in()
        return status.retry_after if returning is None else returning
