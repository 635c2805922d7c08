"""The breakers of single models on a node: one model is ejected while the node's others serve."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

from backend_client._fleet.lease import Lease
from backend_client._resilience.breaker import Breaker
from backend_client._resilience.deadline import Clock
from backend_client.errors import NodeError
from backend_client.options import BreakerOptions

log = logging.getLogger(__name__)


class ModelBreakers:
    """A breaker is made for a model at its first failure, and kept at its node."""

    def __init__(self, options: BreakerOptions, clock: Clock, rng: random.Random) -> None:
        self._options = replace(options, longest=options.longest_model)
        self._clock = clock
        self._rng = rng

    def abandon(self, lease: Lease) -> None:
        """Record a request that shows nothing about the model."""
        if (breaker := lease.node.breakers.get(lease.model)) is not None:
            breaker.abandoned(lease.model_ticket)

    def eject(self, lease: Lease, why: str) -> None:
        """Send the model no requests on this node for a while. Requests sent before its ejection tell nothing new."""
        breaker = self._of(lease)
        if breaker.closed or lease.model_ticket:
            breaker.trip()
            self._ejected(lease, why)

    def failed(self, lease: Lease, error: NodeError) -> None:
        """Record a failure of the engine; too many failures eject the model."""
        if self._of(lease).failed(lease.model_ticket, error.failure):
            self._ejected(lease, error.what)

    def _ejected(self, lease: Lease, why: str) -> None:
        lease.node.ejections[lease.model] = why
        pause = self._of(lease).opens_in
        log.warning("%s on node %s is ejected for %.1f s: %s", lease.model, lease.node.url, pause, why)

    def _of(self, lease: Lease) -> Breaker:
        breaker = lease.node.breakers.get(lease.model)
        if breaker is None:
            breaker = lease.node.breakers[lease.model] = Breaker(self._options, self._clock, self._rng)
        return breaker
