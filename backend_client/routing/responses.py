"""Routes requests that refer to a stored response to the node that stores it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from backend_client.errors import NPUError
from backend_client.fleet.pool import Pool
from backend_client.http.messages import Exchange
from backend_client.results import RawReply

_RESPONSES = "/v1/responses"
_REMEMBERED = 10_000


class Owner(NamedTuple):
    """The node that stores a response, and the model that made it."""

    node: str
    model: str


class StoredResponses:
    """Remembers the owners of the responses that this client made; the nodes are searched for others.

    `known` waits until the state of every node is known.
    """

    def __init__(self, pool: Pool, known: Callable[[], Awaitable[None]]) -> None:
        self._pool = pool
        self._known = known
        self._owners: OrderedDict[str, Owner] = OrderedDict()

    def learn(self, job: Exchange, reply: RawReply, response: object) -> None:
        """Record a reply of `/v1/responses`."""
        identifier = response.get("id") if isinstance(response, dict) else None
        if job.path == _RESPONSES and job.method == "POST" and isinstance(identifier, str):
            self._owners[identifier] = Owner(reply.node, reply.model)
            while len(self._owners) > _REMEMBERED:
                self._owners.popitem(last=False)

    async def placed(self, job: Exchange, send: Callable[[Exchange], Awaitable[RawReply]]) -> Exchange:
        """The job, bound to the node that stores what it refers to. `send` carries out an exchange."""
        wanted = _reference(job)
        if wanted is None or job.node is not None:
            return job
        owner = self._owners.get(wanted) or await self._search(job, wanted, send)
        if owner is None:
            return job
        return replace(job, node=owner.node, model=job.model or owner.model)

    async def _search(
        self, job: Exchange, wanted: str, send: Callable[[Exchange], Awaitable[RawReply]]
    ) -> Owner | None:
        await self._known()
        candidates = list(self._candidates())
        if len(candidates) == 1:
            return candidates[0]
        for owner in candidates:
            ask = Exchange(
                path=f"{_RESPONSES}/{wanted}",
                method="GET",
                deadline=job.deadline,
                node=owner.node,
                model=owner.model,
                extra_headers=job.extra_headers,
            )
            try:
                await send(ask)
            except NPUError:
                continue
            self._owners[wanted] = owner
            return owner
        return None

    def _candidates(self) -> Iterator[Owner]:
        for node in self._pool.nodes.values():
            models = [model.id for model in node.models.values() if model.serves("generation")]
            if models:
                yield Owner(node.url, models[0])


def _reference(job: Exchange) -> str | None:
    """The id of the stored response that a job refers to."""
    if job.path == _RESPONSES:
        found: Any = (job.body or {}).get("previous_response_id")
        return found if isinstance(found, str) else None
    if job.path.startswith(f"{_RESPONSES}/"):
        return job.path.split("/")[3]
    return None
