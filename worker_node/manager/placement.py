"""A model on a device: the engine that runs it, its limits, and the door before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker_node.domain import Device
from worker_node.engines.base import Engine, EngineState
from worker_node.hosting.isolation import Isolation
from worker_node.hosting.suspicion import Suspects
from worker_node.routing import NOTHING, Candidate, Feature, Obstacle
from worker_node.scheduling.admission import Admission

# A guess at the load of an engine that was never loaded here.
_UNKNOWN_LOAD_S = 20.0
_OBSTACLES: dict[EngineState, Obstacle] = {
    EngineState.UNLOADED: "model_loading",
    EngineState.STARTING: "model_loading",
    EngineState.BACKING_OFF: "device_unavailable",
    EngineState.QUARANTINED: "device_quarantined",
    EngineState.FAILED: "device_unavailable",
    EngineState.STOPPED: "device_unavailable",
}


@dataclass(frozen=True, slots=True)
class Placement:
    """`prompt_limit` and `total_limit` are tokens, as in `routing.Candidate`.

    `lacks` is what its engine cannot do. An `on_demand` engine is loaded for the requests that need it. `notes` say
    what was found at start-up. `suspects` are those of the model, shared by its placements.
    """

    device: Device
    engine: Engine
    admission: Admission
    prompt_limit: int
    total_limit: int
    emulated: bool = False
    on_demand: bool = False
    notes: tuple[str, ...] = ()
    lacks: frozenset[Feature] = NOTHING
    isolation: Isolation = field(default_factory=Isolation)
    suspects: Suspects = field(default_factory=Suspects)

    def expected_load_s(self) -> float:
        """How long the next load is going to take, as far as is known."""
        return self.engine.status.load_seconds or _UNKNOWN_LOAD_S

    def candidate(self) -> Candidate:
        """This placement as routing sees it now."""
        status = self.engine.status
        return Candidate(
            device=self.device,
            prompt_limit=self.prompt_limit,
            total_limit=self.total_limit,
            obstacle=_OBSTACLES.get(status.state),
            detail=status.reason,
            lacks=self.lacks,
            retry_after=self.expected_load_s() if status.state is EngineState.UNLOADED else status.retry_after,
        )
