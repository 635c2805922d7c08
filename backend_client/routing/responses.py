"""Routes requests that refer to a stored response to the node that stores it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from backend_client.errors import NPUError
from backend_client.fleet.pool import Pool
from backend_client.http.messages import Exchange
from backend_client.results import RawReply

_RESPONSES = "/v1/responses"


async def placed(
    job: Exchange, pool: Pool, known: Callable[[], Awaitable[None]], send: Callable[[Exchange], Awaitable[RawReply]]
) -> Exchange:
    """The job, bound to the node that stores what it refers to: the nodes are asked for it in turn.

    Nothing is remembered, so the processes of a service find each other's responses. `known` waits until the state of
    every node is known, `send` carries out an exchange.
    """
    wanted = _reference(job)
    if wanted is None or job.node is not None:
        return job
    await known()
    nodes = {
        node.url: next((model.id for model in node.models.values() if model.serves("generation")), None)
        for node in pool.nodes.values()
    }
    candidates = {url: model for url, model in nodes.items() if model is not None}
    for url, model in candidates.items():
        if len(candidates) > 1:
            path = f"{_RESPONSES}/{wanted}"
            ask = Exchange(
                path=path,
                method="GET",
                deadline=job.deadline,
                node=url,
                model=model,
                local_only=True,
                extra_headers=job.extra_headers,
            )
            try:
                stored = (await send(ask)).body
            except NPUError:
                continue
            model = stored.get("model", model) if isinstance(stored, dict) else model  # noqa: PLW2901
        return replace(job, node=url, model=job.model or model)
    return job


def _reference(job: Exchange) -> str | None:
    """The id of the stored response that a job refers to."""
    if job.path == _RESPONSES:
        found: Any = (job.body or {}).get("previous_response_id")
        return found if isinstance(found, str) else None
    if job.path.startswith(f"{_RESPONSES}/"):
        return job.path.split("/")[3]
    return None
