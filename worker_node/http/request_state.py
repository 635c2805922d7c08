"""The keys of an application and its requests."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from worker_node.http.leniency import Ignored
from worker_node.node import Node


@dataclass(slots=True)
class RequestState:
    """What the HTTP side knows of a request: one object, since each key of a request or an application costs calls.

    It `arrived` at that monotonic time. `ignored` are its fields without effect; None where nobody lists them.
    `begun`: the head of the reply has gone; `complete`, its status, once all of a stream has been written.
    """

    node: Node
    id: str
    arrived: float
    ignored: Ignored | None = None
    begun: bool = False
    complete: int | None = None


NODE = web.AppKey("node", Node)
STATE = web.RequestKey("state", RequestState)
