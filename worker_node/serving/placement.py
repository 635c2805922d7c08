"""A model on a device: the engine that runs it, its limits, and the door before it."""

from __future__ import annotations

from dataclasses import dataclass

from worker_node.domain import Device
from worker_node.engines.base import Engine, EngineState
from worker_node.routing import Candidate, Obstacle
from worker_node.scheduling.admission import Admission

_OBSTACLES: dict[EngineState, Obstacle] = {
    EngineState.STARTING: "model_loading",
    EngineState.BACKING_OFF: "device_unavailable",
    EngineState.QUARANTINED: "device_quarantined",
    EngineState.FAILED: "device_unavailable",
    EngineState.STOPPED: "device_unavailable",
}


@dataclass(frozen=True, slots=True)
class Placement:
    """`prompt_limit` and `total_limit` are tokens, as in `routing.Candidate`."""

    device: Device
    engine: Engine
    admission: Admission
    prompt_limit: int
    total_limit: int
    emulated: bool = False

    def candidate(self) -> Candidate:
        """This placement as routing sees it now."""
        status = self.engine.status
        return Candidate(
            device=self.device,
            prompt_limit=self.prompt_limit,
            total_limit=self.total_limit,
            obstacle=_OBSTACLES.get(status.state),
            detail=status.reason,
            retry_after=status.retry_after,
        )
