"""Chooses the nodes of a large fleet that a call considers, so that its cost is the same with thousands of nodes.

Power of two choices among a few nodes drawn at random is power of two choices among all. Only nodes with precedence
must not be missed: those whose trial is due, and those in slow start that had no request for a while. They are among
the nodes that were in trouble or came back, which are few and remembered here.
"""

from __future__ import annotations

import random
from collections.abc import Collection

from backend_client._fleet.node import Node, Requirement
from backend_client._fleet.selection import refusal, starved

# Fleets of up to so many nodes are looked at as a whole.
SMALL_FLEET = 16
_DRAWN = 8


class Sample:
    """The nodes of a fleet in an order to draw from, and those that may go before others."""

    def __init__(self, slow_start: float, rng: random.Random) -> None:
        self._slow_start = slow_start
        self._rng = rng
        self._nodes: list[Node] = []
        self._watched: dict[Node, None] = {}

    def add(self, node: Node) -> None:
        """Add a node of the fleet."""
        self._nodes.append(node)

    def remove(self, node: Node) -> None:
        """Remove a node of the fleet."""
        self._nodes.remove(node)
        self._watched.pop(node, None)

    def watch(self, node: Node) -> None:
        """Always consider the node until it is calm: it failed in something, or came back."""
        self._watched[node] = None

    def eligible(self, need: Requirement, tried: Collection[str], now: float) -> list[Node] | None:
        """Nodes outside of `tried` to choose from as from all that could take the request.

        None where all have to be looked at: the fleet is small, or few of the drawn nodes have the model in memory.
        """
        if len(self._nodes) <= SMALL_FLEET:
            return None
        name = need.model or ""
        drawn = {
            node: None
            for node in self._rng.sample(self._nodes, _DRAWN)
            if node.url not in tried and refusal(node, need, now) is None
        }
        ready = sum((model := node.resolve(name)) is not None and model.loaded for node in drawn)
        if ready < 2:
            return None
        first = [node for node in self._restless(now) if node not in drawn and self._goes_first(node, name, now)]
        return [*(n for n in first if n.url not in tried and refusal(n, need, now) is None), *drawn]

    def _goes_first(self, node: Node, name: str, now: float) -> bool:
        model = node.resolve(name)
        return node.half_open(model.id if model else name) or starved(node, now, self._slow_start)

    def _restless(self, now: float) -> list[Node]:
        """The watched nodes, without those that have no precedence any more."""
        calm = [node for node in self._watched if self._is_calm(node, now)]
        for node in calm:
            del self._watched[node]
        return list(self._watched)

    def _is_calm(self, node: Node, now: float) -> bool:
        started = node.returned_at is None or now - node.returned_at >= self._slow_start
        return started and node.breaker.closed and all(breaker.closed for breaker in node.breakers.values())
