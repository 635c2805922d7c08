"""A node leased to one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend_client._fleet.node import Node, Requirement


@dataclass(eq=False, slots=True)
class Lease:
    """A node is lent to one request of that `size`, at the time `began`. `on_lost` is called when its probes fail.

    `ticket` and `model_ticket` are those of the breakers. `heard`: the answer has begun. `queued`: the request waits
    for a free connection. `late`: the event loop was blocked when its time was up. `loading`: the model was not in
    memory. `waiting_since`: the client waits for the node since then; None while the caller reads.
    """

    node: Node
    need: Requirement
    model: str
    ticket: int
    began: float
    size: int = 0
    model_ticket: int = 0
    heard: bool = False
    queued: bool = False
    late: bool = False
    loading: bool = False
    lost: bool = False
    ended: bool = False
    waiting_since: float | None = None
    on_lost: Callable[[], None] | None = None
    on_heard: Callable[[], None] | None = None

    @property
    def name_is_kept(self) -> bool:
        """Whether the node still takes the requested name for the model that the request was meant for."""
        found = self.node.resolve(self.need.model or "")
        return found is None or found.id == self.model
