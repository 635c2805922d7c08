"""What travels between the edge and the engine."""

import msgspec

from worker_node.core.types import NOT_MEASURED, Busy
from worker_node.engines.protocol import Outcome


class CountJob(msgspec.Struct, frozen=True, tag="count", array_like=True):
    """Count the vowels of each text."""

    id: int
    texts: list[str]
    deadline: float
    interactive: bool = True

    @property
    def ends(self):
        return self.deadline

    def timeless(self):
        return CountJob(0, self.texts, 0.0)


class Counted(Outcome, frozen=True, array_like=True):
    """The counts of one job, with what `serving.run.SingleResult` asks for."""

    id: int
    counts: list[int]
    started: float
    inference_s: float
    busy: Busy = NOT_MEASURED
    measured_tokens: int = 0
    measured_s: float = 0.0

    @property
    def last(self):
        return True
