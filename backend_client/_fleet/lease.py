"""A node leased to one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend_client._fleet.node import Node, Requirement
from backend_client._protocol.names import plain_name
from backend_client.errors import BadReply


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

    def check_answer(self, model: str | None, device: str | None) -> None:
        """Raise BadReply for the head, or the end, of an answer that names another model, or not the required device.

        See `check_model`.
        """
        self.check_model(model)
        if self.need.device not in {None, device}:
            what = "does not name its device" if device is None else "names another device"
            what = f"{self.need.device} was required, and the answer {what}"
            raise BadReply(what, node=self.node.url, contradicts=True)

    def check_model(self, answered: object) -> None:
        """Raise BadReply for the answer of another model than the one that was asked, by its id or a listed alias.

        None: the answer does not name its model.
        """
        asked = self.need.model
        if answered is None or asked is None:
            return
        name = answered if isinstance(answered, str) else ""
        if plain_name(name) in {plain_name(asked), plain_name(self.model)}:
            return
        found = self.node.resolve(name)
        # Where the node was set up anew during the call, its next report may already name the model that answered.
        if found is None or found is not self.node.resolve(asked):
            # A name that the node does not list may be any text.
            what = found.id if found else "a model that its /health does not list"
            raise BadReply(f"was asked for {asked} and answered as {what}", node=self.node.url, contradicts=True)
