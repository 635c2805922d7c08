"""The NPUs first, then the cloud. Here, and nowhere else, NPUUnavailableError is caught."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

from backend_client.cloud.ledger import Ledger
from backend_client.errors import CloudError, CloudRejected, NPUUnavailableError
from backend_client.http.forwarding import Forwarded
from backend_client.http.messages import EmbedJob, Exchange, J, Job, plain_texts
from backend_client.http.routes import only_on_nodes
from backend_client.http.stream_forms import EventStream
from backend_client.lifetime import STARTED, Deadline, owning
from backend_client.options import FallbackOptions
from backend_client.results import Attempt, EmbedBatch, RawReply
from backend_client.routing.backend import FleetBackend

if TYPE_CHECKING:
    from backend_client.cloud.backend import CloudBackend


log = logging.getLogger(__name__)
A = TypeVar("A", EmbedBatch, RawReply)
R = TypeVar("R")
C = TypeVar("C")
Attempts = tuple[Attempt, ...]


class FallbackBackend:
    """The fleet, and behind it the cloud for what the fleet cannot serve and the cloud may."""

    def __init__(
        self,
        fleet: FleetBackend,
        cloud: CloudBackend | None,
        ledger: Ledger,
        options: FallbackOptions,
        *,
        local_only: bool,
    ) -> None:
        self._fleet = fleet
        self._cloud = cloud
        self._ledger = ledger
        self._options = options
        self._local_only = local_only
        self._bindings = fleet.runtime.bindings
        if cloud is not None and not local_only:
            _warn_of_embeddings(cloud.spaces, self._bindings.spaces.values())

    async def close(self) -> None:
        await self._fleet.close()
        if self._cloud is not None:
            await self._cloud.close()

    async def embed(self, job: EmbedJob) -> EmbedBatch:
        """Embed on a node, else in the cloud if it has a model for the same vector space."""
        return await self._whole(job, self._fleet.embed, lambda cloud, wanted: cloud.embed(wanted))

    async def exchange(self, job: Exchange) -> RawReply:
        """A request on a node; a chat or a prompt else in the cloud."""
        return await self._whole(job, self._fleet.exchange, lambda cloud, wanted: cloud.exchange(wanted))

    async def forward(self, job: Exchange) -> tuple[Forwarded | EmbedBatch | RawReply | EventStream, Attempts]:
        """See `Backend.forward`. What the cloud replied is not in bytes."""
        texts = plain_texts(job.body or {}) if job.path == "/v1/embeddings" else None

        async def on_fleet(shared: Job, until: Deadline) -> Forwarded:
            found, _ = await self._fleet.forward(replace(job, cloud_takes_over=shared.cloud_takes_over), until)
            return found

        async def in_cloud(cloud: CloudBackend, wanted: Exchange) -> RawReply | EventStream:
            answer, _ = await cloud.forward(wanted)
            return answer

        found: Forwarded | EmbedBatch | RawReply | EventStream
        if texts is None:
            found, before = await self._first(job, on_fleet, in_cloud)
        else:
            common = {field.name: getattr(job, field.name) for field in fields(Job)}
            found, before = await self._first(
                EmbedJob(texts=texts, **common), on_fleet, lambda cloud, wanted: cloud.embed(wanted)
            )
        if isinstance(found, Forwarded) and isinstance(found.content, bytes):
            self._ledger.kept_local(found.watch.usage)
        return found, before

    async def open_exchange(self, job: Exchange, opened_by: Deadline | None = None) -> EventStream:
        """The same as a stream; whichever sends the first part of the answer sends all."""
        # Only the opening leaves time for the cloud: an answer that has begun may take all there is.
        events, before = await self._first(
            job, self._fleet.open_exchange, lambda cloud, wanted: cloud.open_exchange(wanted, opened_by)
        )
        return self._counted(events, before)

    @owning
    async def _counted(self, events: EventStream, before: tuple[Attempt, ...]) -> EventStream:
        try:
            yield STARTED
            async for item in events:
                if isinstance(item, RawReply) and item.source == "node":
                    self._ledger.kept_local(item.usage)
                yield replace(item, attempts=before + item.attempts) if isinstance(item, RawReply) else item
        finally:
            await events.aclose()

    async def _whole(
        self, job: J, on_fleet: Callable[[J], Awaitable[A]], in_cloud: Callable[[CloudBackend, J], Awaitable[A]]
    ) -> A:
        answer, before = await self._first(job, lambda job, until: on_fleet(job.within(until)), in_cloud)
        if answer.source == "node":
            self._ledger.kept_local(answer.usage)
        return replace(answer, attempts=before + answer.attempts) if before else answer

    async def _first(
        self,
        job: J,
        on_fleet: Callable[[J, Deadline], Awaitable[R]],
        in_cloud: Callable[[CloudBackend, J], Awaitable[C]],
    ) -> tuple[R | C, Attempts]:
        """The fleet's answer by a part of the deadline, else the cloud's by the whole; and the attempts before it.

        Raises the fleet's error, which then says why the cloud did not help, or CloudRejected.
        """
        cloud = self._cloud
        try:
            if cloud is None or self._must_stay(job):
                return await on_fleet(job, job.deadline), ()
            shared = replace(job, cloud_takes_over=lambda: not isinstance(self._for_cloud(job, cloud), str))
            return await on_fleet(shared, self._until(job.deadline)), ()
        except NPUUnavailableError as error:
            unavailable = error
        wanted = "none is configured" if cloud is None else self._for_cloud(job, cloud)
        if cloud is None or isinstance(wanted, str):
            raise unavailable.without_cloud(f"the cloud was not asked: {wanted}")
        log.info("%s goes to the cloud: %s", job.request_id, unavailable.message)
        try:
            answer = await in_cloud(cloud, wanted)
        except CloudRejected as error:
            error.attempts = unavailable.attempts + error.attempts
            raise
        except CloudError as error:
            failed = error
        else:
            if isinstance(job, EmbedJob) and isinstance(answer, EmbedBatch):
                # Here, so that no way to the cloud can do without: the caller compares the vectors of all its calls.
                self._bindings.bind(job.model, answer.space.removesuffix(f"-{job.dimensions}"))
            return answer, unavailable.attempts
        unavailable.attempts += failed.attempts
        raise unavailable.without_cloud(failed.message, failed)

    def _for_cloud(self, job: J, cloud: CloudBackend) -> J | str:
        """The job as the cloud gets it, where the fleet's model names mean nothing; or why the cloud cannot serve it.

        This decides whether the cloud may be asked; the spend cap decides last (`cloud/ledger.py`).
        """
        if reason := self._must_stay(job):
            return reason
        wanted = job
        if isinstance(job, EmbedJob):
            known = self._bindings.known(job.model)
            if known.space is None and self._bindings.unknown and len(cloud.spaces) == 1:
                # No node has been seen since the start, and only one space can be meant.
                known = known._replace(space=next(iter(cloud.spaces)))
            if known.space is None:
                return "no node has reported the vector space yet; bind it with spaces.<model>"
            if job.dimensions is not None and job.dimensions != known.dimensions:
                # As the node names it. No cloud model is declared for it unless the settings say so.
                known = known._replace(space=f"{known.space}-{job.dimensions}", dimensions=job.dimensions)
            wanted = replace(job, model=None, **known._asdict())
        elif isinstance(job, Exchange):
            wanted = replace(job, model=cloud.chat_model_for(job.model))
            if wanted.model is None:
                name = job.model
                return (
                    f"no cloud model is declared for {name} (cloud.chat_models)"
                    if name
                    else "cloud.chat_model is not set"
                )
        return cloud.refusal(wanted) or wanted

    def _must_stay(self, job: Job) -> str | None:
        """Why the job is for nodes alone, whatever the cloud has; then no time need be left for the cloud."""
        return "local_only is set" if self._local_only else only_on_nodes(job)

    def _until(self, deadline: Deadline) -> Deadline:
        return deadline.earlier(min(self._options.longest, deadline.remaining() * self._options.share))


def _warn_of_embeddings(spaces: Collection[str], bound: Collection[str]) -> None:
    """Say at the start what embeddings cannot do later, when no node has been seen."""
    if not spaces:
        log.warning(
            "embeddings do not fall back to the cloud: map the vector space of your model (npu-client health --json "
            "shows it) in cloud.embedding_models to a cloud model that makes the same vectors"
        )
    elif len(spaces) > 1 and not set(spaces).intersection(bound):
        log.warning(
            "embeddings do not fall back to the cloud until a node has reported its vector space: "
            "cloud.embedding_models maps %d spaces; bind your model to one of them with spaces.<model>",
            len(spaces),
        )
